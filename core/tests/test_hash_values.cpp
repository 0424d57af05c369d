// XXH64: its published test vectors, and that hashing a column or an integer is hashing its bytes.
#include <set>

#include "data/xxh64.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

constexpr std::uint64_t kSeed = 2654435761; // the other seed of the published vectors

// The buffers that the reference implementation's own check hashes: the top bytes of numbers that begin with kSeed.
template <typename Number, typename Next> std::vector<unsigned char> top_bytes(std::size_t n, Next next) {
    std::vector<unsigned char> bytes(n);
    auto number = static_cast<Number>(kSeed);
    for (unsigned char& byte : bytes) {
        byte = static_cast<unsigned char>(number >> (8 * sizeof(Number) - 8));
        number = next(number);
    }
    return bytes;
}

CASE(known_vectors, 1) {
    CHECK_EQ(hash_text(""), 0xef46db3751d8e999ULL);
    CHECK_EQ(hash_text("a"), 0xd24ec4f1a98c6e5bULL);
    CHECK_EQ(hash_text("abc"), 0x44bc2cf5ad770999ULL);
    const auto former = top_bytes<std::uint32_t>(101, [](std::uint32_t number) { return number * number; });
    const auto present =
        top_bytes<std::uint64_t>(222, [](std::uint64_t number) { return number * 11400714785074694797ULL; });
    struct Vector {
        const std::vector<unsigned char>& bytes;
        std::size_t n;
        std::uint64_t of_zero, of_seed;
    };
    for (const Vector& v : {Vector{former, 0, 0xef46db3751d8e999ULL, 0xac75fda2929b17efULL},
                            Vector{former, 1, 0x4fce394cc88952d8ULL, 0x739840cb819fa723ULL},
                            Vector{former, 14, 0xcffa8db881bc3a3dULL, 0x5b9611585efcc9cbULL},
                            Vector{former, 101, 0x0eab543384f878adULL, 0xcaa65939306f1e21ULL},
                            Vector{present, 1, 0xe934a84adb052768ULL, 0x5014607643a9b4c3ULL},
                            Vector{present, 4, 0x9136a0dca57457eeULL, 0xcaab286bd8e9fdb5ULL},
                            Vector{present, 14, 0x8282dcc4994e35c8ULL, 0xc3bd6bf63deb6df0ULL},
                            Vector{present, 222, 0xb641ae8cb691c174ULL, 0x20cb8ab7ae10c14aULL}}) {
        CHECK_EQ(xxh64(v.bytes.data(), v.n), v.of_zero);
        CHECK_EQ(xxh64(v.bytes.data(), v.n, kSeed), v.of_seed);
    }
}

CASE(integers_are_their_bytes, 3) {
    std::set<std::uint64_t> seen;
    for (int i = 0; i < 2000; ++i) {
        const std::uint64_t value = i < 100 ? static_cast<std::uint64_t>(i) : random.bits();
        unsigned char bytes[8];
        for (unsigned b = 0; b < 8; ++b) bytes[b] = static_cast<unsigned char>(value >> (8 * b));
        CHECK_EQ(hash_integer(value), xxh64(bytes, 8));
        CHECK(seen.insert(hash_integer(value)).second);
    }
}

template <typename Offset> void column_is_its_texts(Random& random) {
    std::string data;
    std::vector<Offset> offsets{static_cast<Offset>(random.below(3))};
    data.resize(static_cast<std::size_t>(offsets[0]));
    const std::uint32_t n = random.below(200);
    for (std::uint32_t i = 0; i < n; ++i) {
        const std::uint32_t size = random.chance(0.1) ? random.below(200) : random.below(20);
        for (std::uint32_t k = 0; k < size; ++k) data.push_back(static_cast<char>(random.word()));
        offsets.push_back(static_cast<Offset>(data.size()));
    }
    std::vector<std::uint64_t> found(n);
    CHECK(hash_texts(offsets.data(), n, data.data(), data.size(), found.data()));
    for (std::uint32_t i = 0; i < n; ++i)
        CHECK_EQ(found[i],
                 hash_text(std::string_view(data).substr(static_cast<std::size_t>(offsets[i]),
                                                         static_cast<std::size_t>(offsets[i + 1] - offsets[i]))));
}

CASE(offsets_that_fall_are_refused, 1) {
    std::uint64_t out[2];
    for (const std::vector<std::int32_t>& offsets :
         {std::vector<std::int32_t>{0, 2, 1}, {-1, 0, 1}, {0, 1, 4}, {3, 2, 3}})
        CHECK(!hash_texts(offsets.data(), 2, "abc", 3, out));
}

CASE(columns_are_their_texts, 20) {
    column_is_its_texts<std::int32_t>(random);
    column_is_its_texts<std::int64_t>(random);
}

} // namespace
