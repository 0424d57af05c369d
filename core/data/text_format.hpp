// The meaning of the fields of a delimited text file: the bindings fill it in from the declared columns for
// delimited.hpp. It holds no data and parses nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace satrap {

enum class UseKind : std::uint8_t { dense, label, ids, weights, text };
enum class MissingLabel : std::uint8_t { value, refuse, drop }; // the effect of a missing field on its sample
enum class LabelKind : std::uint8_t { real, binary, count };    // any number; 0 or 1; a whole number from 0

// One use of a column. A column may have several uses, or none.
struct FieldUse {
    UseKind kind = UseKind::dense;
    std::size_t index = 0; // which dense column, label, feature (of ids and of weights) or text column

    // dense and label
    MissingLabel absent = MissingLabel::value;
    float missing = 0.0F;
    bool log1p = false;
    LabelKind label_kind = LabelKind::real;           // which numbers are taken
    std::optional<float> above;                       // 1 if the number is above this, else 0
    std::vector<std::pair<std::string, float>> texts; // label only: the field is one of these texts, not a number
    std::optional<float> other;                       // label only: any other text

    // ids and weights
    char separator = 0; // between the items of a list; 0: the field is one item
    // ids
    bool integer = false; // the field is a decimal integer, not a text to hash
    bool hash = false;    // hash the integer too
    std::optional<std::uint64_t> missing_id;
};

struct TextFormat {
    std::string delimiter = ","; // 1 to 8 bytes
    int quote = -1;              // -1: quotes are ordinary characters
    bool strip = false;          // blanks around a field are not part of it
    bool quoted_newlines = false;
    std::vector<std::string> missing{""};       // texts that mean that a field is missing
    std::vector<std::vector<FieldUse>> columns; // those of the file in order, then the constants
    std::vector<std::string> constants;         // fields that each row has after those of the file
    std::size_t num_dense = 0;
    std::size_t num_labels = 0;
    std::size_t num_features = 0;
    std::size_t num_texts = 0;
};

// Why a row is refused. The names go to Python, which words the message.
enum class Fault : std::uint8_t {
    none,
    few_columns,
    many_columns,
    number,
    finite,
    integer,
    utf8,
    quote,
    open_quote,
    label,
    label_text,
    label_kind,
    weights,
    empty_item,
};

inline const char* fault_name(Fault fault) {
    constexpr const char* names[] = {"none",       "few_columns", "many_columns", "number",     "finite",
                                     "integer",    "utf8",        "quote",        "open_quote", "label",
                                     "label_text", "label_kind",  "weights",      "empty_item"};
    return names[static_cast<std::size_t>(fault)];
}

// A row that was refused. Positions are bytes from the start of the text.
struct BadRow {
    std::size_t at;
    Fault fault;
    std::size_t column;
    std::size_t field_begin;
    std::size_t field_end;
    std::size_t found;    // columns, or weights
    std::size_t expected; // columns, or ids
};

} // namespace satrap
