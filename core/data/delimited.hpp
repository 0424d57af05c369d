// Parses a piece of delimited text (CSV, TSV, Criteo) into columns, in one pass: fields are found, converted, hashed
// and appended in place. It reads no files: the caller cuts them so that a piece holds whole rows. A bad row
// leaves nothing but its BadRow. A piece is parsed by one thread; pieces are independent.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_columns.hpp"
#include "data/text_format.hpp"
#include "data/text_number.hpp"
#include "data/xxh64.hpp"

namespace satrap {

// Sixteen counts side by side in bytes, which compilers make one vector of; each is added up before it can overflow.
inline std::size_t count_lines(std::string_view text) {
    constexpr std::size_t kLanes = 16, kRounds = 255;
    std::size_t lines = 0, at = 0;
    while (text.size() - at >= kLanes) {
        std::array<std::uint8_t, kLanes> lanes{};
        const std::size_t end = at + kLanes * std::min(kRounds, (text.size() - at) / kLanes);
        for (; at != end; at += kLanes)
            for (std::size_t i = 0; i < kLanes; ++i) lanes[i] += text[at + i] == '\n';
        for (const std::uint8_t each : lanes) lines += each;
    }
    return lines +
           static_cast<std::size_t>(std::count(text.begin() + static_cast<std::ptrdiff_t>(at), text.end(), '\n'));
}

// Returns where the last whole row ends: behind its newline, or 0. With a quote character (-1: none) a newline inside
// quotes ends no row; the text begins outside of quotes.
inline std::size_t last_row_end(std::string_view text, int quote) {
    if (quote < 0) {
        const std::size_t at = text.rfind('\n');
        return at == std::string_view::npos ? 0 : at + 1;
    }
    bool quoted = false;
    std::size_t end = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == static_cast<char>(quote))
            quoted = !quoted;
        else if (text[i] == '\n' && !quoted)
            end = i + 1;
    }
    return end;
}

// Returns where row number `row` begins, counted from row 0 at `at`; the text's end if there are fewer rows.
inline std::size_t row_begin(std::string_view text, int quote, std::size_t at, std::size_t row) {
    bool quoted = false;
    for (; row != 0 && at < text.size(); ++at) {
        if (quote < 0) {
            at = text.find('\n', at);
            if (at == std::string_view::npos) return text.size();
            --row;
        } else if (text[at] == static_cast<char>(quote)) {
            quoted = !quoted;
        } else if (text[at] == '\n' && !quoted) {
            --row;
        }
    }
    return at;
}

// Counts whole rows: those that a newline ends, and a last one without. Quotes are treated as in last_row_end.
inline std::size_t count_rows(std::string_view text, int quote) {
    if (quote < 0) return count_lines(text) + (!text.empty() && text.back() != '\n');
    std::size_t rows = 0;
    for (std::size_t at = 0; at < text.size(); ++rows) at = row_begin(text, quote, at, 1);
    return rows;
}

struct ParsedText {
    std::shared_ptr<Samples> samples;
    std::vector<TextColumn> texts;
    std::vector<BadRow> bad;
    std::size_t dropped = 0; // rows without a label, where the format says to drop them
};

class DelimitedParser {
  public:
    explicit DelimitedParser(const TextFormat& format) : format_(format) {
        first_ = format.delimiter[0];
        num_fields_ = format.columns.size() - format.constants.size();
        delimiters_ = kOnes * static_cast<unsigned char>(first_);
        missing_empty_ = std::find(format.missing.begin(), format.missing.end(), "") != format.missing.end();
        for (const std::string& text : format.missing) longest_missing_ = std::max(longest_missing_, text.size());
    }

    // Stops after bad row number `most_bad` + 1.
    ParsedText parse(std::string_view text, std::size_t most_bad) {
        begin_ = text.data();
        end_ = begin_ + text.size();
        check_utf8_ = !is_ascii(text);
        columns_ = std::make_unique<TextColumns>(format_, count_lines(text) + 1);
        ParsedText out;
        const char* at = begin_;
        while (at != end_ && out.bad.size() <= most_bad) {
            if (const char* next = blank_line(at); next != nullptr) {
                at = next;
                continue;
            }
            bad_ = {static_cast<std::size_t>(at - begin_), Fault::none, 0, 0, 0, 0, 0};
            drop_ = false;
            const char* next = row(at);
            if (next != nullptr && !drop_) {
                columns_->commit();
            } else {
                columns_->take_back();
                if (next == nullptr)
                    out.bad.push_back(bad_);
                else
                    ++out.dropped;
            }
            at = next != nullptr ? next : after_line(at);
        }
        out.samples = columns_->hand_over();
        out.texts = std::move(columns_->texts);
        columns_.reset();
        return out;
    }

  private:
    static constexpr std::uint64_t kOnes = 0x0101010101010101ULL;

    // A field without its quotes, and where it ends: at a delimiter, a newline or the end of the text.
    struct Field {
        std::string_view text;
        const char* stop;
    };

    // Returns the high bit of each zero byte; exact up to the first one.
    static std::uint64_t zero_bytes(std::uint64_t word) { return (word - kOnes) & ~word & (kOnes << 7); }

    // Finds the first possible delimiter or newline at or after `at`.
    const char* find(const char* at) const {
        for (; end_ - at >= 8; at += 8) {
            const auto word = Xxh64::load<std::uint64_t>(reinterpret_cast<const unsigned char*>(at));
            const std::uint64_t hit = zero_bytes(word ^ delimiters_) | zero_bytes(word ^ (kOnes * '\n'));
            if (hit != 0) return at + (std::countr_zero(hit) >> 3);
        }
        while (at != end_ && *at != first_ && *at != '\n') ++at;
        return at;
    }

    bool delimiter_at(const char* at) const {
        const std::string& delimiter = format_.delimiter;
        return delimiter.size() == 1 || (static_cast<std::size_t>(end_ - at) >= delimiter.size() &&
                                         std::memcmp(at, delimiter.data(), delimiter.size()) == 0);
    }

    const char* field_end(const char* at) const {
        for (at = find(at); at != end_ && *at != '\n' && !delimiter_at(at); at = find(at + 1)) {
        }
        return at;
    }

    const char* after_line(const char* at) const {
        const void* newline = std::memchr(at, '\n', static_cast<std::size_t>(end_ - at));
        return newline == nullptr ? end_ : static_cast<const char*>(newline) + 1;
    }

    // Returns the end of an empty line; nullptr if the line is not empty. In a file of one column it is a missing
    // field.
    const char* blank_line(const char* at) const {
        if (num_fields_ == 1) return nullptr;
        if (*at == '\r' && ++at == end_) return at;
        return *at == '\n' ? at + 1 : nullptr;
    }

    bool blank(char c) const { return (c == ' ' || c == '\t') && c != format_.delimiter[0]; }

    std::string_view stripped(const char* from, const char* to) const {
        while (from != to && blank(*from)) ++from;
        while (from != to && blank(to[-1])) --to;
        return {from, static_cast<std::size_t>(to - from)};
    }

    // Parses the row at `at`; returns where the next begins, or nullptr with bad_ set.
    const char* row(const char* at) {
        for (std::size_t c = 0; c < num_fields_; ++c) {
            const Field field = read(at);
            if (field.stop == nullptr) return refuse(c, at, end_), nullptr;
            if (!apply_uses(c, field.text)) return refuse(c, at, field.stop), nullptr;
            const bool last = field.stop == end_ || *field.stop == '\n';
            if (last != (c + 1 == num_fields_)) return wrong_columns(at, field.stop, c + 1), nullptr;
            at = last ? field.stop + (field.stop == end_ ? 0 : 1) : field.stop + format_.delimiter.size();
        }
        for (std::size_t c = num_fields_; c < format_.columns.size(); ++c)
            if (!apply_uses(c, format_.constants[c - num_fields_])) return refuse(c, at, at), nullptr;
        std::size_t feature = 0;
        if (const IdColumn* column = columns_->uneven_weights(feature); column != nullptr) {
            bad_.fault = Fault::weights;
            bad_.column = feature;
            bad_.found = column->new_weights(columns_->n);
            bad_.expected = column->new_ids(columns_->n);
            return nullptr;
        }
        return at;
    }

    // Applies all uses of a column to its field; returns false, with bad_.fault set, if one refuses it.
    bool apply_uses(std::size_t column, std::string_view text) {
        for (const FieldUse& use : format_.columns[column]) {
            bad_.fault = apply(use, text);
            if (bad_.fault != Fault::none) return false;
        }
        return true;
    }

    void refuse(std::size_t column, const char* from, const char* to) {
        bad_.column = column;
        bad_.field_begin = static_cast<std::size_t>(from - begin_);
        bad_.field_end = static_cast<std::size_t>(to - begin_);
    }

    void wrong_columns(const char* at, const char* stop, std::size_t found) {
        const bool few = stop == end_ || *stop == '\n';
        for (; !few && stop != nullptr && stop != end_ && *stop != '\n'; ++found) {
            at = stop + format_.delimiter.size();
            stop = read(at).stop;
        }
        bad_.fault = few ? Fault::few_columns : Fault::many_columns;
        bad_.found = found;
        bad_.expected = num_fields_;
        refuse(0, at, at);
    }

    // Reads the field at `at`. If its quotes are wrong, `stop` is nullptr and bad_.fault tells how.
    Field read(const char* at) {
        if (format_.quote >= 0) {
            const char* open = at;
            while (format_.strip && open != end_ && blank(*open)) ++open;
            if (open != end_ && *open == static_cast<char>(format_.quote)) return read_quoted(open + 1);
        }
        const char* stop = field_end(at);
        const char* to = stop;
        if (to != at && to[-1] == '\r' && (stop == end_ || *stop == '\n')) --to;
        if (format_.strip) return {stripped(at, to), stop};
        return {{at, static_cast<std::size_t>(to - at)}, stop};
    }

    Field read_quoted(const char* at) {
        const char quote = static_cast<char>(format_.quote);
        const char* from = at;
        bool doubled = false;
        scratch_.clear();
        for (;; ++at) {
            if (at == end_ || (*at == '\n' && !format_.quoted_newlines)) {
                bad_.fault = Fault::open_quote;
                return {{}, nullptr};
            }
            if (*at != quote) continue;
            if (at + 1 == end_ || at[1] != quote) break;
            scratch_.append(from, at + 1); // one of the two quotes
            from = ++at + 1;
            doubled = true;
        }
        std::string_view text{from, static_cast<std::size_t>(at - from)};
        if (doubled) text = scratch_.append(text);
        ++at;
        while (format_.strip && at != end_ && blank(*at)) ++at;
        if (at != end_ && *at == '\r' && (at + 1 == end_ || at[1] == '\n')) ++at;
        if (at == end_ || *at == '\n' || (*at == first_ && delimiter_at(at))) return {text, at};
        bad_.fault = Fault::quote;
        return {{}, nullptr};
    }

    bool is_missing(std::string_view text) const {
        if (text.empty()) return missing_empty_;
        if (text.size() > longest_missing_) return false;
        return std::find(format_.missing.begin(), format_.missing.end(), text) != format_.missing.end();
    }

    Fault apply(const FieldUse& use, std::string_view text) {
        switch (use.kind) {
        case UseKind::dense:
            return number(use, text, columns_->dense.data()[columns_->n * columns_->num_dense + use.index]);
        case UseKind::label:
            return number(use, text, columns_->label.data()[columns_->n * columns_->num_labels + use.index]);
        case UseKind::ids: return ids(use, text);
        case UseKind::weights: return weights(use, text);
        case UseKind::text: break;
        }
        if (check_utf8_ && !is_utf8(text)) return Fault::utf8;
        const bool missing = is_missing(text);
        columns_->texts[use.index].set(columns_->n, missing ? std::string_view{} : text, !missing);
        return Fault::none;
    }

    Fault number(const FieldUse& use, std::string_view text, float& out) {
        if (is_missing(text)) return absent(use, out);
        float value;
        if (!use.texts.empty()) {
            if (check_utf8_ && !is_utf8(text)) return Fault::utf8;
            const auto entry =
                std::find_if(use.texts.begin(), use.texts.end(), [&](const auto& each) { return each.first == text; });
            if (entry == use.texts.end() && !use.other) return Fault::label_text;
            value = entry == use.texts.end() ? *use.other : entry->second;
        } else {
            const auto parsed = parse_number(text);
            if (!parsed) return Fault::number;
            if (std::isnan(*parsed)) return absent(use, out);
            value = static_cast<float>(*parsed);
            if (std::isinf(value)) return Fault::finite;
        }
        if (use.above) value = value > *use.above ? 1.0F : 0.0F;
        if (!is_of(use.label_kind, value)) return Fault::label_kind;
        out = use.log1p ? log1p_of(value) : value;
        return Fault::none;
    }

    static bool is_of(LabelKind kind, float value) {
        switch (kind) {
        case LabelKind::real: break;
        case LabelKind::binary: return value == 0.0F || value == 1.0F;
        case LabelKind::count: return value >= 0.0F && std::floor(value) == value;
        }
        return true;
    }

    Fault absent(const FieldUse& use, float& out) {
        if (use.absent == MissingLabel::refuse) return Fault::label;
        if (use.absent == MissingLabel::drop) drop_ = true;
        out = use.missing;
        return Fault::none;
    }

    Fault ids(const FieldUse& use, std::string_view text) {
        IdColumn& column = columns_->ids[use.index];
        if (is_missing(text)) {
            column.bag_is_missing();
            if (use.missing_id)
                column.set(columns_->n, *use.missing_id);
            else
                column.begin_bag(columns_->n);
            return Fault::none;
        }
        if (check_utf8_ && !use.integer && !is_utf8(text)) return Fault::utf8;
        std::uint64_t id;
        if (use.separator == 0) {
            if (!id_of(use, text, id)) return Fault::integer;
            column.set(columns_->n, id);
            return Fault::none;
        }
        column.begin_bag(columns_->n);
        return each_item(use, text, [&](std::string_view item) {
            if (is_missing(item)) {
                if (use.missing_id)
                    column.add(*use.missing_id);
                else if (column.weighted())
                    return Fault::empty_item;
                return Fault::none;
            }
            if (!id_of(use, item, id)) return Fault::integer;
            column.add(id);
            return Fault::none;
        });
    }

    static bool id_of(const FieldUse& use, std::string_view text, std::uint64_t& id) {
        if (!use.integer) {
            id = hash_text(text);
            return true;
        }
        const auto parsed = parse_integer(text);
        if (parsed) id = use.hash ? hash_integer(*parsed) : *parsed;
        return parsed.has_value();
    }

    Fault weights(const FieldUse& use, std::string_view text) {
        IdColumn& column = columns_->ids[use.index];
        if (is_missing(text)) return Fault::none;
        return each_item(use, text, [&](std::string_view item) {
            const auto weight = parse_number(item);
            if (!weight) return Fault::number;
            const auto value = static_cast<float>(*weight);
            if (!std::isfinite(value)) return Fault::finite;
            column.add_weight(value);
            return Fault::none;
        });
    }

    template <typename Call> Fault each_item(const FieldUse& use, std::string_view text, Call call) const {
        const char *at = text.data(), *const end = at + text.size();
        for (;;) {
            const char* stop = use.separator == 0 ? end : std::find(at, end, use.separator);
            const std::string_view item{at, static_cast<std::size_t>(stop - at)};
            if (const Fault fault = call(format_.strip ? stripped(at, stop) : item); fault != Fault::none) return fault;
            if (stop == end) return Fault::none;
            at = stop + 1;
        }
    }

    const TextFormat& format_;
    std::size_t num_fields_; // in a row of the text
    char first_ = 0;         // the first of the delimiter's characters
    std::uint64_t delimiters_ = 0;
    bool missing_empty_ = false;
    std::size_t longest_missing_ = 0;
    const char* begin_ = nullptr; // where the text begins
    const char* end_ = nullptr;
    bool check_utf8_ = false;
    std::unique_ptr<TextColumns> columns_;
    std::string scratch_; // a quoted field without its doubled quotes
    BadRow bad_{};
    bool drop_ = false;
};

} // namespace satrap
