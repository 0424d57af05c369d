// Included by kernels_avx2.cpp and kernels_avx512.cpp in their own anonymous namespaces; see kernels_body.hpp.

// The last steps of the tree of kernels_portable.cpp: lane j to lane j + 4, then + 2, + 1.
inline float total_of(__m256 eight) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
