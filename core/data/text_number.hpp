// Numbers and characters of text files: decimal text to floats and integers, log1p, UTF-8. Every function is exact by
// IEEE operations alone, so that a file gives the same bits on every machine, whatever its locale.
#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "base/hash.hpp"

namespace satrap {

// Reads the digits at `at` as a number; stops before the first other character, or before a 19th digit.
inline std::uint64_t leading_digits(const char*& at, const char* end) {
    const char* const last = end - at > 18 ? at + 18 : end;
    std::uint64_t value = 0;
    for (; at != last && static_cast<unsigned char>(*at - '0') < 10; ++at)
        value = value * 10 + static_cast<std::uint64_t>(*at - '0');
    return value;
}

// Returns a number whose exponent is out of a double's range: 0 if it is tiny, infinite if it is huge.
inline double out_of_range(std::string_view text) {
    const std::size_t exponent = text.find_first_of("eE");
    if (exponent != std::string_view::npos)
        return text[exponent + 1] == '-' ? 0.0 : std::numeric_limits<double>::infinity();
    return text.find_first_not_of("-0") == text.find('.') ? 0.0 : std::numeric_limits<double>::infinity();
}

// Parses a decimal number, "nan" or "inf"; returns nothing if the text is something else.
inline std::optional<double> parse_number(std::string_view text) {
    const char *at = text.data(), *const end = at + text.size();
    const bool negative = at != end && *at == '-';
    const char* const digits = at + (negative ? 1 : 0);
    const char* stop = digits;
    const std::uint64_t whole = leading_digits(stop, end);
    if (stop == end && stop != digits && stop - digits <= 15) // most numbers: exact in a double
        return negative ? -static_cast<double>(whole) : static_cast<double>(whole);
    if (at != end && *at == '+') {
        ++at;
        if (at != end && *at == '-') return std::nullopt;
    }
    double value = 0.0;
    const auto [parsed, error] = std::from_chars(at, end, value);
    if (parsed != end || at == end || error == std::errc::invalid_argument) return std::nullopt;
    return error == std::errc::result_out_of_range ? out_of_range({at, static_cast<std::size_t>(end - at)}) : value;
}

// Parses a whole decimal number of int64's or uint64's range, as 64 bits.
inline std::optional<std::uint64_t> parse_integer(std::string_view text) {
    const char *at = text.data(), *const end = at + text.size();
    const bool negative = at != end && *at == '-';
    if (at != end && (*at == '-' || *at == '+')) ++at;
    const char* const digits = at;
    std::uint64_t value = leading_digits(at, end);
    for (; at != end && static_cast<unsigned char>(*at - '0') < 10; ++at) {
        const auto digit = static_cast<std::uint64_t>(*at - '0');
        if (value > (std::numeric_limits<std::uint64_t>::max() - digit) / 10) return std::nullopt;
        value = value * 10 + digit;
    }
    if (at != end || at == digits || (negative && value > std::uint64_t{1} << 63)) return std::nullopt;
    return negative ? ~value + 1 : value;
}

// Returns ln(1 + max(x, 0)), the transformation of counts for training. Rounded once, from a double.
inline float log1p_of(float x) {
    static const auto table = [] {
        std::array<float, 1024> t{};
        for (std::size_t i = 0; i < t.size(); ++i)
            t[i] = static_cast<float>(portable_log(1.0 + static_cast<double>(i)));
        return t;
    }();
    if (!(x > 0.0F)) return x <= 0.0F ? 0.0F : x; // NaN stays
    if (x < 1024.0F && x == static_cast<float>(static_cast<int>(x))) return table[static_cast<std::size_t>(x)];
    if (x < 1e-4F) { // where 1 + x would lose x's low bits
        const double y = x;
        return static_cast<float>(y - y * y / 2 + y * y * y / 3);
    }
    return std::isinf(x) ? x : static_cast<float>(portable_log(1.0 + static_cast<double>(x)));
}

// Returns whether all bytes are ASCII.
inline bool is_ascii(std::string_view text) {
    std::uint64_t seen = 0;
    const char *at = text.data(), *const end = at + text.size();
    for (; end - at >= 8; at += 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        seen |= word;
    }
    for (; at != end; ++at) seen |= static_cast<unsigned char>(*at);
    return (seen & 0x8080808080808080ULL) == 0;
}

// Returns whether the text is UTF-8 by its standard: the shortest form, no surrogates, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) {
    const auto* at = reinterpret_cast<const unsigned char*>(text.data());
    const unsigned char* const end = at + text.size();
    while (at != end) {
        const unsigned lead = *at++;
        if (lead < 0x80) continue;
        if (lead < 0xc2 || lead > 0xf4) return false;
        const unsigned more = lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
        if (end - at < static_cast<std::ptrdiff_t>(more)) return false;
        const unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        const unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (*at < low || *at > high) return false;
        for (unsigned i = 1; i < more; ++i)
            if ((at[i] & 0xc0U) != 0x80) return false;
        at += more;
    }
    return true;
}

} // namespace satrap
