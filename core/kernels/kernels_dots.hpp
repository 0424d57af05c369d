// DLRM's interaction of one sample, included by each kernels_*.cpp in its own anonymous namespace: the dot products of
// all pairs of its vectors, and their gradient. Each path brings `Sixteen` (sixteen floats with load, broadcast, store
// and plus_product) and kBlock, how many rows fit into registers beside what they share.
//
// Sums run over ascending elements, so one path gives one result; the portable path rounds products before it adds
// them, the others do not. No table depends on these bits.

// scratch: `rows` vectors of `width` floats, padded with zeros; the same by column; a square of products or gradients.
struct DotScratch {
    DotScratch(const DotShape& shape, float* memory)
        : vectors(memory), columns(vectors + shape.rows() * shape.width()),
          square(columns + shape.width() * shape.rows()), triangle(square + shape.rows() * shape.rows()) {}
    float* vectors;
    float* columns;
    float* square;
    float* triangle; // the pairs, and room for the last store
};

inline void load_vectors(const DotShape& shape, const float* const* from, const DotScratch& at) {
    for (std::uint32_t i = 0; i < shape.num; ++i) copy_floats(at.vectors + i * shape.width(), from[i], shape.dim);
}

// square[i][j] = vector i * vector j, where j is in a group of sixteen that has some j < i.
void dots(const DotShape& shape, const float* const* vectors, float* out, float* scratch) {
    const DotScratch at(shape, scratch);
    const std::uint32_t rows = shape.rows(), width = shape.width();
    load_vectors(shape, vectors, at);
    for (std::uint32_t i = 0; i < shape.num; ++i)
        for (std::uint32_t d = 0; d < shape.dim; ++d) at.columns[d * rows + i] = at.vectors[i * width + d];
    for (std::uint32_t i = 0; i < shape.num; i += kBlock) {
        for (std::uint32_t j = 0; j < i + kBlock - 1 && j < shape.num; j += 16) {
            Sixteen sums[kBlock];
            for (std::uint32_t d = 0; d < shape.dim; ++d) {
                const Sixteen column = Sixteen::load(at.columns + d * rows + j);
#pragma GCC unroll 8
                for (std::uint32_t r = 0; r < kBlock; ++r)
                    sums[r].plus_product(Sixteen::broadcast(at.vectors + (i + r) * width + d), column);
            }
            for (std::uint32_t r = 0; r < kBlock; ++r) sums[r].store(at.square + (i + r) * rows + j);
        }
    }
    float* row = at.triangle; // each row's stores overlap the next row's, which come later
    for (std::uint32_t i = 1; i < shape.num; row += i++)
        for (std::uint32_t j = 0; j < i; j += 16) Sixteen::load(at.square + i * rows + j).store(row + j);
    copy_floats(out, at.triangle, shape.pairs());
}

// gradients[i] = sum over j of (the pair's gradient) * vector j
void dots_back(const DotShape& shape, const float* const* vectors, const float* pairs, float* const* gradients,
               float* scratch) {
    const DotScratch at(shape, scratch);
    const std::uint32_t rows = shape.rows(), width = shape.width();
    load_vectors(shape, vectors, at);
    for (std::uint32_t i = 1; i < shape.num; pairs += i++)
        for (std::uint32_t j = 0; j < i; ++j) at.square[i * rows + j] = at.square[j * rows + i] = pairs[j];
    for (std::uint32_t i = 0; i < shape.num; ++i) at.square[i * rows + i] = 0.0f;
    for (std::uint32_t i = 0; i < shape.num; i += kBlock) {
        for (std::uint32_t d = 0; d < shape.dim; d += 16) {
            Sixteen sums[kBlock];
            for (std::uint32_t j = 0; j < shape.num; ++j) {
                const Sixteen part = Sixteen::load(at.vectors + j * width + d);
#pragma GCC unroll 8
                for (std::uint32_t r = 0; r < kBlock; ++r)
                    sums[r].plus_product(Sixteen::broadcast(at.square + (i + r) * rows + j), part);
            }
            for (std::uint32_t r = 0; r < kBlock && i + r < shape.num; ++r) {
                if (d + 16 <= shape.dim) {
                    sums[r].store(gradients[i + r] + d);
                } else {
                    sums[r].store(at.columns);
                    copy_floats(gradients[i + r] + d, at.columns, shape.dim - d);
                }
            }
        }
    }
}
