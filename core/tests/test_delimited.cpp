// The parser of delimited text: against a slow one that splits strings, on random text, good and bad; and its numbers
// against strtod. Texts end exactly where their memory does, so that the sanitizer sees a byte too many.
#include <cmath>
#include <limits>
#include <map>

#include "data/delimited.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

using Strings = std::vector<std::string>;

ParsedText parse(const TextFormat& format, const std::string& text, std::size_t most_bad = 1000) {
    const std::unique_ptr<char[]> exact(new char[text.size()]);
    std::copy(text.begin(), text.end(), exact.get());
    return DelimitedParser(format).parse({exact.get(), text.size()}, most_bad);
}

FieldUse use_of(UseKind kind, std::size_t index) {
    FieldUse use;
    use.kind = kind;
    use.index = index;
    return use;
}

TextFormat texts_only(std::size_t num_columns, const std::string& delimiter, int quote) {
    TextFormat format;
    format.delimiter = delimiter;
    format.quote = quote;
    format.num_texts = num_columns;
    for (std::size_t c = 0; c < num_columns; ++c) format.columns.push_back({use_of(UseKind::text, c)});
    return format;
}

std::string text_at(const TextColumn& column, std::size_t i) {
    const auto* data = reinterpret_cast<const char*>(column.data.data());
    return {data + column.offsets.data()[i], data + column.offsets.data()[i + 1]};
}

Fault only_fault(const ParsedText& parsed) {
    CHECK_EQ(parsed.bad.size(), 1);
    return parsed.bad[0].fault;
}

// Fields of any characters, quoted where that is needed and sometimes where not, come back as they were.
CASE(quoting_is_undone, testing::scaled(300)) {
    const std::string delimiter = random.pick(Strings{",", "\t", "::", "|~|"});
    TextFormat format = texts_only(random.between(1, 6), delimiter, '"');
    format.quoted_newlines = random.chance(0.5);
    const Strings pieces{"a", "bc", "", ",", ":", "|", "~", "\t", "\"", " ", "\r", "0123456789abcdef", "\xc3\xa9"};
    std::vector<Strings> rows;
    std::string text;
    for (std::uint32_t r = random.below(40); r > 0; --r) {
        Strings row;
        for (std::size_t c = 0; c < format.columns.size(); ++c) {
            std::string field;
            for (std::uint32_t k = random.below(5); k > 0; --k) field += random.pick(pieces);
            if (format.quoted_newlines && random.chance(0.2)) field += '\n';
            const bool must = field.find_first_of("\"\r\n") != std::string::npos ||
                              (field + delimiter).find(delimiter) != field.size();
            if (c > 0) text += delimiter;
            if (must || random.chance(0.2)) {
                text += '"';
                for (char ch : field) text += ch == '"' ? "\"\"" : std::string(1, ch);
                text += '"';
            } else {
                text += field;
            }
            row.push_back(field);
        }
        if (row.size() > 1 && random.chance(0.1))
            text += random.chance(0.5) ? "\r\n\n" : "\n\r\n"; // and an empty line
        else
            text += random.chance(0.2) ? "\r\n" : "\n";
        rows.push_back(row);
    }
    if (!text.empty() && text.back() == '\n' && random.chance(0.3) && !(rows.back() == Strings{""})) text.pop_back();
    const ParsedText parsed = parse(format, text);
    CHECK_EQ(parsed.bad.size(), 0);
    CHECK_EQ(parsed.samples->n, rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i)
        for (std::size_t c = 0; c < rows[i].size(); ++c) {
            CHECK_EQ(text_at(parsed.texts[c], i), rows[i][c]);
            CHECK_EQ(parsed.texts[c].present.data()[i], rows[i][c].empty() ? 0 : 1);
        }
}

// -- columns of every kind, against a model that splits each line ---------------------------------------------------

struct Model {
    std::vector<std::vector<std::uint64_t>> bags[2];
    std::vector<std::vector<float>> weights;
    std::vector<float> dense, label;
};

Strings split(const std::string& text, char at) {
    Strings out{""};
    for (char c : text) {
        if (c == at)
            out.emplace_back();
        else
            out.back() += c;
    }
    return out;
}

// label, dense, ids (integers, "|"-separated), their weights, texts to hash
TextFormat mixed_format(Random& random) {
    TextFormat format;
    format.delimiter = "\t";
    format.missing = {"", "NA"};
    format.num_dense = format.num_labels = 1;
    format.num_features = 2;
    FieldUse label = use_of(UseKind::label, 0), dense = use_of(UseKind::dense, 0), list = use_of(UseKind::ids, 0);
    label.absent = random.chance(0.5) ? MissingLabel::drop : MissingLabel::refuse;
    dense.missing = -1.0F;
    list.integer = true;
    list.separator = '|';
    FieldUse weights = use_of(UseKind::weights, 0), text = use_of(UseKind::ids, 1);
    weights.separator = '|';
    if (random.chance(0.5)) text.missing_id = 42;
    if (random.chance(0.3)) list.missing_id = 43;
    format.columns = {{label}, {dense}, {list}, {weights}, {text}};
    return format;
}

bool missing(const std::string& field) { return field.empty() || field == "NA"; }

// What a row must become; false if it is bad. `drop` if it is left out.
bool model_row(const TextFormat& format, const std::string& line, Model& model, bool& drop) {
    const Strings fields = split(line, '\t');
    if (fields.size() != 5) return false;
    const FieldUse &label = format.columns[0][0], &list = format.columns[2][0], &text = format.columns[4][0];
    if (missing(fields[0]) && label.absent == MissingLabel::refuse) return false;
    drop = missing(fields[0]);
    if (fields[0] == "x" || fields[1] == "x") return false;
    std::vector<std::uint64_t> ids, texts;
    std::vector<float> weights;
    if (missing(fields[2])) {
        if (list.missing_id) ids.push_back(*list.missing_id), weights.push_back(1.0F);
    } else {
        for (const std::string& item : split(fields[2], '|')) {
            if (item == "x") return false;
            if (missing(item) && !list.missing_id) return false; // weights stand beside it
            ids.push_back(missing(item) ? *list.missing_id : std::stoull(item));
        }
    }
    if (!missing(fields[3]))
        for (const std::string& item : split(fields[3], '|')) {
            if (item == "x" || item.empty()) return false;
            if (!missing(fields[2])) weights.push_back(std::stof(item));
        }
    if (ids.size() != weights.size()) return false;
    if (!missing(fields[4]))
        texts.push_back(hash_text(fields[4]));
    else if (text.missing_id)
        texts.push_back(*text.missing_id);
    if (drop) return true;
    model.label.push_back(std::stof(fields[0]));
    model.dense.push_back(missing(fields[1]) ? -1.0F : std::stof(fields[1]));
    model.bags[0].push_back(ids);
    model.weights.push_back(weights);
    model.bags[1].push_back(texts);
    return true;
}

void check_bags(const BagColumn& column, const std::vector<std::vector<std::uint64_t>>& expected,
                const std::vector<std::vector<float>>* weights) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const auto begin =
            static_cast<std::size_t>(column.offsets == nullptr ? static_cast<std::int64_t>(i) : column.offsets[i]);
        const auto end = static_cast<std::size_t>(column.offsets == nullptr ? static_cast<std::int64_t>(i) + 1
                                                                            : column.offsets[i + 1]);
        CHECK_EQ(end - begin, expected[i].size());
        for (std::size_t k = begin; k < end; ++k) {
            CHECK_EQ(column.values[k * column.stride], expected[i][k - begin]);
            if (weights != nullptr) CHECK_EQ(column.weights[k], (*weights)[i][k - begin]);
        }
    }
}

CASE(columns_are_the_models, testing::scaled(600)) {
    const TextFormat format = mixed_format(random);
    const Strings labels{"0", "1", "1", "0.5", "", "x"}, numbers{"3", "-2.5", "1e3", "", "NA", "x"};
    const Strings lists{"7", "1|2|3", "18446744073709551615|5", "", "NA", "4||6", "8|x"};
    const Strings weights{"1", "0.5|2|3", "1|-2", "", "1|1|1", "2|x"}, texts{"abc", "NA", "", "defghijklm"};
    const double wild = random.chance(0.5) ? 0.3 : 0.0;
    Model model;
    std::string text;
    std::size_t num_bad = 0, dropped = 0, most_bad = random.chance(0.5) ? 1000 : random.below(3);
    bool stopped = false;
    for (std::uint32_t r = random.below(60); r > 0; --r) {
        auto pick = [&](const Strings& from, std::size_t good) {
            return from[random.chance(wild) ? random.below(from.size()) : random.below(good)];
        };
        std::string line = pick(labels, 4) + "\t" + pick(numbers, 5) + "\t";
        const std::size_t which = random.below(3);
        line += random.chance(wild) ? pick(lists, 7) + "\t" + pick(weights, 6) : lists[which] + "\t" + weights[which];
        line += "\t" + pick(texts, 4);
        if (random.chance(wild / 4)) line += "\tmore";
        if (random.chance(wild / 4)) line = "1\t2";
        text += line + "\n";
        bool drop = false;
        if (stopped) continue;
        if (!model_row(format, line, model, drop))
            stopped = ++num_bad > most_bad;
        else if (drop)
            ++dropped;
    }
    const ParsedText parsed = parse(format, text, most_bad);
    CHECK_EQ(parsed.bad.size(), num_bad);
    CHECK_EQ(parsed.dropped, dropped);
    CHECK_EQ(parsed.samples->n, model.label.size());
    for (std::size_t i = 0; i < model.label.size(); ++i) {
        CHECK_EQ(parsed.samples->label[i], model.label[i]);
        CHECK_EQ(parsed.samples->dense[i], model.dense[i]);
    }
    check_bags(parsed.samples->ids[0], model.bags[0], &model.weights);
    check_bags(parsed.samples->ids[1], model.bags[1], nullptr);
}

// -- faults ----------------------------------------------------------------------------------------------------------

CASE(every_fault_is_named, 1) {
    TextFormat format;
    format.quote = '"';
    format.num_dense = format.num_labels = format.num_features = format.num_texts = 1;
    FieldUse label = use_of(UseKind::label, 0), ids = use_of(UseKind::ids, 0);
    label.absent = MissingLabel::refuse;
    ids.integer = true;
    format.columns = {{label}, {use_of(UseKind::dense, 0)}, {ids}, {use_of(UseKind::text, 0)}};
    const std::map<std::string, Fault> faults{
        {"1,2,3", Fault::few_columns},
        {"1,2,3,4,5,6", Fault::many_columns},
        {"1,two,3,4", Fault::number},
        {"1,1e39,3,4", Fault::finite},
        {"1,-inf,3,4", Fault::finite},
        {"1,2,3.0,4", Fault::integer},
        {"1,2,-9223372036854775809,4", Fault::integer},
        {"1,2,18446744073709551616,4", Fault::integer},
        {"1,2,3,\xff", Fault::utf8},
        {"1,2,3,\xed\xa0\x80", Fault::utf8},
        {"1,2,3,\"a\"b", Fault::quote},
        {"1,2,3,\"a", Fault::open_quote},
        {"1,\"2\n,3,4", Fault::open_quote},
        {",2,3,4", Fault::label},
        {"nan,2,3,4", Fault::label},
        {"yes,2,3,4", Fault::number},
    };
    for (const auto& [row, fault] : faults) {
        const ParsedText parsed = parse(format, "1,2,3,4\n" + row + "\n5,6,7,8", 0);
        CHECK_EQ(fault_name(only_fault(parsed)), std::string(fault_name(fault)));
        CHECK_EQ(parsed.bad[0].at, 8);
        CHECK_EQ(parsed.samples->n, 1);
    }
    label.texts = {{">50K", 1.0F}, {"<=50K", 0.0F}};
    format.columns[0] = {label};
    CHECK_EQ(fault_name(only_fault(parse(format, ">50K,2,3,4\n>50k,2,3,4"))), std::string("label_text"));
}

CASE(constants_are_fields_of_every_row, 1) {
    TextFormat format = texts_only(4, ",", '"');
    format.constants = {"2024", ""};
    const ParsedText parsed = parse(format, "a,b\n1,2,3\nc,d");
    CHECK_EQ(fault_name(only_fault(parsed)), std::string("many_columns"));
    CHECK_EQ(parsed.bad[0].expected, 2);
    CHECK_EQ(parsed.samples->n, 2);
    for (std::size_t i = 0; i < 2; ++i) {
        CHECK_EQ(text_at(parsed.texts[1], i), std::string(i == 0 ? "b" : "d"));
        CHECK_EQ(text_at(parsed.texts[2], i), std::string("2024"));
        CHECK_EQ(parsed.texts[3].present.data()[i], 0);
    }
    format.num_dense = 1;
    format.columns[2].push_back(use_of(UseKind::dense, 0));
    CHECK_EQ(parse(format, "a,b").samples->dense[0], 2024.0F);
    format.constants[0] = "x";
    const ParsedText refused = parse(format, "a,b");
    CHECK_EQ(fault_name(only_fault(refused)), std::string("number"));
    CHECK_EQ(refused.bad[0].column, 2);
}

CASE(numbers_are_strtods, 4) {
    CHECK(!parse_number("")); // a missing field is looked for before
    for (const char* text : {"-", "+", "+-1", "1e", "e5", "0x10", "1 ", " 1", "1,5", "--1", "1.2.3", "infx", "1e+"})
        CHECK(!parse_number(text));
    for (const char* text :
         {"0", "-0", "+7", "007", ".5", "5.", "1e5", "-1E-3", "123456789012345", "1234567890123456789",
          "99999999999999999999999", "1e308", "1e-320", "4.9e-324", "inf", "-Infinity"})
        CHECK_EQ(*parse_number(text), std::strtod(text, nullptr));
    CHECK(std::signbit(*parse_number("-0")));
    CHECK(std::isnan(*parse_number("nan")));
    CHECK_EQ(*parse_number("1e400"), std::numeric_limits<double>::infinity());
    CHECK_EQ(*parse_number("1e-400"), 0.0);
    CHECK_EQ(*parse_number("0." + std::string(400, '0') + "1"), 0.0);
    CHECK_EQ(*parse_number("1" + std::string(400, '0')), std::numeric_limits<double>::infinity());
    for (int i = 0; i < 500; ++i) {
        char text[64];
        const double value = std::ldexp(random.real(-1, 1), static_cast<int>(random.below(200)) - 100);
        std::snprintf(text, sizeof(text), random.chance(0.5) ? "%.17g" : "%.6f", value);
        CHECK_EQ(*parse_number(text), std::strtod(text, nullptr));
        const std::uint64_t bits = random.bits() >> random.below(64);
        CHECK_EQ(*parse_integer(std::to_string(bits)), bits);
        CHECK_EQ(*parse_integer(std::to_string(static_cast<std::int64_t>(bits))), bits);
    }
}

CASE(log1p_is_close_and_fixed, 2) {
    CHECK_EQ(log1p_of(0.0F), 0.0F);
    CHECK_EQ(log1p_of(-3.0F), 0.0F);
    CHECK_EQ(log1p_of(1.0F), 0.693147182F);
    CHECK_EQ(log1p_of(65535.0F), 11.0903549F);
    CHECK(std::isnan(log1p_of(std::numeric_limits<float>::quiet_NaN())));
    for (int i = 0; i < 2000; ++i) {
        const float x = i < 1100 ? static_cast<float>(i) : std::ldexp(random.real(0, 1), int(random.below(140)) - 100);
        CHECK(std::fabs(log1p_of(x) - std::log1p(static_cast<double>(x))) <= 1e-7 * std::log1p(static_cast<double>(x)));
    }
}

// Against a walk over every byte; long texts without other characters overflow counts that are not added up in time.
CASE(rows_are_counted_and_found, testing::scaled(200)) {
    std::string text;
    const bool dense = random.below(2) != 0;
    for (std::size_t n = random.below(dense ? 9000 : 60); n != 0; --n) text += dense ? '\n' : "\n\"ax"[random.below(4)];
    for (const int quote : {-1, int{'"'}}) {
        std::vector<std::size_t> begins{0};
        bool quoted = false;
        for (std::size_t i = 0; i < text.size(); ++i) {
            if (text[i] == '"') quoted = !quoted;
            if (text[i] == '\n' && (quote < 0 || !quoted)) begins.push_back(i + 1);
        }
        CHECK_EQ(count_rows(text, quote), begins.size() - (begins.back() == text.size() ? 1U : 0U));
        CHECK_EQ(last_row_end(text, quote), begins.back());
        for (std::size_t row = 0; row < begins.size(); row += 1 + row / 8)
            CHECK_EQ(row_begin(text, quote, 0, row), begins[row]);
        CHECK_EQ(row_begin(text, quote, 0, begins.size()), text.size());
        CHECK_EQ(count_lines(text), static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')));
    }
}

} // namespace
