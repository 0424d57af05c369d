// DLRM's interaction of a batch: for every sample the dot products of all pairs of its vectors, in one pass over each.
// A sample's vectors are `first` (the bottom network's output, if there is one), then the rows of its embeddings'
// block; its output is `first` again, then the pairs, row by row of the triangle: (1, 0), (2, 0), (2, 1), ... A
// sample needs no memory but its input and its output. Samples are split among threads, which does not change the
// result.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "base/fork_guard.hpp"
#include "base/thread_pool.hpp"
#include "kernels/kernels.hpp"

namespace satrap {

class DlrmInteraction {
  public:
    DlrmInteraction(const Kernels& kernels, unsigned num_threads)
        : kernels_(&kernels), pool_(new ThreadPool(num_threads)) {}
    DlrmInteraction(const DlrmInteraction&) = delete;
    DlrmInteraction& operator=(const DlrmInteraction&) = delete;
    ~DlrmInteraction() {
        if (!fork_guard_.is_same_process())
            (void)pool_.release(); // a fork has none of its threads, so they cannot be joined
    }

    // first: [batch, dim] or nullptr; block: [batch, num_block, dim]; out: [batch, (dim) + pairs]
    void forward(std::size_t batch, std::uint32_t num_block, std::uint32_t dim, const float* first, const float* block,
                 float* out) {
        const Layout at(num_block, dim, first != nullptr);
        each_sample(batch, at, [&](std::size_t s, const float** vectors, float**, float* scratch) {
            at.point(vectors, first, block, s);
            float* to = out + s * at.out_dim();
            if (first != nullptr) std::copy_n(vectors[0], dim, to);
            kernels_->dots(at.shape, vectors, to + at.head(), scratch);
        });
    }

    // gradient: that of out. Writes the gradients of first and block.
    void backward(std::size_t batch, std::uint32_t num_block, std::uint32_t dim, const float* first, const float* block,
                  const float* gradient, float* of_first, float* of_block) {
        const Layout at(num_block, dim, first != nullptr);
        each_sample(batch, at, [&](std::size_t s, const float** vectors, float** gradients, float* scratch) {
            at.point(vectors, first, block, s);
            at.point(gradients, of_first, of_block, s);
            const float* from = gradient + s * at.out_dim();
            kernels_->dots_back(at.shape, vectors, from + at.head(), gradients, scratch);
            if (first != nullptr)
                for (std::uint32_t d = 0; d < dim; ++d) gradients[0][d] += from[d];
        });
    }

  private:
    static constexpr std::size_t kSmall = 64; // samples; fewer are not worth a second thread

    struct Layout {
        Layout(std::uint32_t num_block, std::uint32_t dim, bool has_first)
            : shape{num_block + (has_first ? 1U : 0U), dim}, num_block(num_block) {}
        DotShape shape;
        std::uint32_t num_block;
        std::size_t head() const { return shape.num == num_block ? 0 : shape.dim; }
        std::size_t out_dim() const { return head() + shape.pairs(); }
        template <typename Float> void point(Float** vectors, Float* first, Float* block, std::size_t sample) const {
            if (head() != 0) *vectors++ = first + sample * shape.dim;
            block += sample * num_block * shape.dim;
            for (std::uint32_t i = 0; i < num_block; ++i) vectors[i] = block + std::size_t{i} * shape.dim;
        }
    };

    template <typename Work> void each_sample(std::size_t batch, const Layout& at, Work work) {
        const unsigned most = !fork_guard_.is_same_process() || batch < kSmall ? 1 : pool_->num_threads();
        struct ThreadScratch {
            std::vector<float> scratch;
            std::vector<const float*> vectors;
            std::vector<float*> gradients;
        };
        std::vector<ThreadScratch> scratches(most); // allocated here, where running out of memory can be reported
        for (ThreadScratch& own : scratches) {
            own.scratch.assign(at.shape.scratch_floats(), 0.0f);
            own.vectors.resize(at.shape.num);
            own.gradients.resize(at.shape.num);
        }
        const auto job = [&](unsigned thread, unsigned threads) {
            ThreadScratch& own = scratches[thread];
            for (std::size_t s = batch * thread / threads; s < batch * (thread + 1) / threads; ++s)
                work(s, own.vectors.data(), own.gradients.data(), own.scratch.data());
        };
        if (most == 1)
            job(0, 1);
        else
            pool_->run(job);
    }

    const Kernels* kernels_;
    ForkGuard fork_guard_;
    std::unique_ptr<ThreadPool> pool_;
};

} // namespace satrap
