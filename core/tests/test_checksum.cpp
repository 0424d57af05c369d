// CRC-32C: published vectors, chaining, and the processor's instruction against the table.
#include "base/checksum.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

std::vector<std::uint8_t> bytes_of(const char* text) { return {text, text + std::strlen(text)}; }

CASE(known_vectors, 1) {
    std::vector<std::uint8_t> zeros(32, 0), ones(32, 0xff), rising(32), falling(32); // RFC 3720, B.4
    for (std::uint8_t i = 0; i < 32; ++i) rising[i] = i, falling[i] = static_cast<std::uint8_t>(31 - i);
    const std::pair<std::vector<std::uint8_t>, std::uint32_t> vectors[] = {{{}, 0},
                                                                           {bytes_of("a"), 0xc1d04330U},
                                                                           {bytes_of("123456789"), 0xe3069283U},
                                                                           {zeros, 0x8a9136aaU},
                                                                           {ones, 0x62a8ab43U},
                                                                           {rising, 0x46dd794eU},
                                                                           {falling, 0x113fdb5cU}};
    for (const auto& [data, expected] : vectors) {
        CHECK_EQ(crc32c(data.data(), data.size(), 0), expected);
        CHECK_EQ(crc32c_portable(data.data(), data.size(), 0), expected);
    }
}

CASE(chains_and_agrees, 20) {
    std::vector<std::uint8_t> data(3000);
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random.word());
    for (int i = 0; i < 300; ++i) {
        const std::size_t first = random.below(64), n = random.chance(0.5) ? random.below(80) : random.below(2900);
        const std::size_t cut = random.below(n + 1);
        const std::uint8_t* at = data.data() + first;
        const std::uint32_t start = random.chance(0.3) ? 0 : random.word();
        const std::uint32_t whole = crc32c(at, n, start);
        CHECK_EQ(crc32c(at + cut, n - cut, crc32c(at, cut, start)), whole);
        CHECK_EQ(crc32c_portable(at, n, start), whole);
    }
}

CASE(sees_every_bit, 20) {
    std::vector<std::uint8_t> data(random.between(1, 40));
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random.word());
    const std::uint32_t before = crc32c(data.data(), data.size(), 0);
    for (std::size_t bit = 0; bit < data.size() * 8; ++bit) {
        data[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
        CHECK(crc32c(data.data(), data.size(), 0) != before);
        data[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
    }
}

} // namespace
