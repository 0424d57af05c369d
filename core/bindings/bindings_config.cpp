// The Python binding of a table's configuration: reads the dict that satrap.Table.to_dict() returns, field by field, by
// the names that Python uses. A field that the core does not know is refused.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.hpp"

namespace satrap {

namespace {

class Fields {
  public:
    Fields(std::string where, const nb::handle& fields)
        : where_(std::move(where)), left_(nb::steal<nb::dict>(PyDict_Copy(fields.ptr()))) {
        if (!left_.is_valid()) throw nb::python_error();
    }

    template <typename Value> void read(const char* name, Value& value) {
        const nb::object field = take(name);
        if (!field.is_none() && !nb::try_cast(field, value))
            refuse(where_ + name + " is " + nb::repr(field).c_str() + ", which the core cannot hold");
    }

    template <typename Choice> void choose(const char* name, Choice& value, Choices<Choice> known) {
        std::string text;
        read(name, text);
        value = satrap::choose(where_ + name, text, known);
    }

    // The fields of a part, such as the optimizer.
    Fields part(const char* name) {
        const nb::object fields = take(name);
        if (!nb::isinstance<nb::dict>(fields))
            refuse(where_ + name + " is " + nb::repr(fields).c_str() + "; expected a dict");
        return Fields(where_ + name + ": ", fields);
    }

    void ignore(const char* name) { take(name); }

    void require_all_read() const {
        if (left_.size() != 0) refuse(where_ + "the core knows no field " + nb::repr(left_.keys()[0]).c_str());
    }

  private:
    nb::object take(const char* name) { return left_.attr("pop")(name, nb::none()); }

    std::string where_;
    nb::dict left_;
};

void read_optimizer(Fields fields, OptimizerConfig& optimizer) {
    fields.choose("type", optimizer.kind,
                  {{"SGD", OptimizerKind::sgd},
                   {"Adagrad", OptimizerKind::adagrad},
                   {"RowWiseAdagrad", OptimizerKind::rowwise_adagrad},
                   {"Adam", OptimizerKind::adam},
                   {"AdamW", OptimizerKind::adamw},
                   {"Ftrl", OptimizerKind::ftrl}});
    fields.read("lr", optimizer.lr);
    fields.read("momentum", optimizer.momentum);
    fields.read("nesterov", optimizer.nesterov);
    fields.read("weight_decay", optimizer.weight_decay);
    fields.read("initial_accumulator_value", optimizer.initial_accumulator_value);
    fields.read("eps", optimizer.eps);
    fields.read("betas", optimizer.betas);
    fields.read("beta", optimizer.beta);
    fields.read("l1", optimizer.l1);
    fields.read("l2", optimizer.l2);
    fields.require_all_read();
}

void read_initial(Fields fields, TableConfig& config) {
    fields.choose(
        "type", config.initial,
        {{"Uniform", InitialKind::uniform}, {"Normal", InitialKind::normal}, {"Constant", InitialKind::constant}});
    for (const char* name : {"low", "mean", "value"}) fields.read(name, config.initial_a);
    for (const char* name : {"high", "std"}) fields.read(name, config.initial_b);
    fields.require_all_read();
}

void read_admission(Fields fields, TableConfig& config) {
    fields.choose("type", config.admission,
                  {{"Always", AdmissionKind::always},
                   {"Probability", AdmissionKind::probability},
                   {"MinCount", AdmissionKind::min_count}});
    fields.read("p", config.probability);
    fields.read("n", config.min_count);
    fields.read("window", config.window);
    fields.read("first_epoch_only", config.first_epoch_only);
    fields.require_all_read();
}

void require_valid(const std::string& where, const TableConfig& config) {
    if (config.dim < 1 || config.dim > 65536)
        refuse(where + "dim=" + std::to_string(config.dim) + ", expected 1..65536");
    if (!std::has_single_bit(config.num_buckets) || config.num_buckets > 65536)
        refuse(where + "num_buckets=" + std::to_string(config.num_buckets) + ", expected a power of two up to 65536");
    const bool leaves = config.capacity != 0 || config.expire_after != 0 || config.admission != AdmissionKind::always;
    if (config.is_direct() && leaves)
        refuse(where + "num_rows=" + std::to_string(config.num_rows) +
               " with a capacity, admission or expire_after, which are for tables without num_rows");
    if (config.is_direct() && (config.num_rows - 1) / config.num_buckets >= kMostBucketRows)
        refuse(where + "num_rows=" + std::to_string(config.num_rows) + " is above " + std::to_string(kMostBucketRows) +
               " rows for each of num_buckets=" + std::to_string(config.num_buckets));
    if (config.capacity != 0 && config.capacity < config.num_buckets)
        refuse(where + "capacity=" + std::to_string(config.capacity) +
               " is below num_buckets=" + std::to_string(config.num_buckets));
    if (config.capacity != 0 && (config.capacity - 1) / config.num_buckets >= kMostBucketRows)
        refuse(where + "capacity=" + std::to_string(config.capacity) + " is above " + std::to_string(kMostBucketRows) +
               " rows for each of num_buckets=" + std::to_string(config.num_buckets));
}

FrozenIds frozen_set(const std::string& where, const Ids& ids) {
    const std::span<const std::uint64_t> given(ids.data(), ids.size());
    if (std::adjacent_find(given.begin(), given.end(), std::greater_equal<>()) != given.end())
        refuse(where + "frozen_ids do not rise; expected each id once, in order");
    return FrozenIds::of(given);
}

TableConfig read_table(const nb::typed<nb::dict, std::string, nb::any>& table,
                       const std::optional<std::uint32_t>& frame_pool, const std::optional<Ids>& frozen_ids) {
    TableConfig config;
    config.frame_pool = frame_pool;
    Fields("table: ", table).read("name", config.name);
    const std::string where = "table '" + config.name + "': ";
    Fields fields(where, table);
    fields.read("name", config.name);
    fields.read("dim", config.dim);
    read_optimizer(fields.part("optimizer"), config.optimizer);
    read_initial(fields.part("initial"), config);
    fields.choose("dtype", config.dtype,
                  {{"float32", Dtype::float32}, {"float16", Dtype::float16}, {"bfloat16", Dtype::bfloat16}});
    read_admission(fields.part("admission"), config);
    fields.read("capacity", config.capacity);
    fields.read("num_rows", config.num_rows);
    fields.choose("on_full", config.on_full,
                  {{"evict", OnFull::evict}, {"raise", OnFull::raise}, {"grow", OnFull::grow}});
    fields.read("expire_after", config.expire_after);
    fields.choose("absent", config.absent, {{"initial", Absent::initial}, {"zeros", Absent::zeros}});
    fields.choose("on_nonfinite", config.on_nonfinite, {{"raise", OnNonfinite::raise}, {"skip", OnNonfinite::skip}});
    std::variant<bool, std::array<std::uint64_t, 2>> frozen = false;
    fields.read("frozen", frozen);
    if (const auto* ends = std::get_if<1>(&frozen); ends != nullptr)
        config.frozen = {(*ends)[0], (*ends)[1]};
    else if (std::get<0>(frozen))
        config.frozen = {0, ~std::uint64_t{0}};
    if (frozen_ids) config.frozen = frozen_set(where, *frozen_ids);
    fields.read("num_buckets", config.num_buckets);
    fields.ignore("shard"); // for several servers
    fields.require_all_read();
    require_valid(where, config);
    return config;
}

} // namespace

void bind_config(nb::module_& m) {
    nb::class_<TableConfig>(m, "TableConfig", "A table's configuration in the core.")
        .def(nb::new_(&read_table), "table"_a, "frame_pool"_a = nb::none(), "frozen_ids"_a = nb::none(),
             "table: what satrap.Table.to_dict() returns, with its num_buckets, and a range of frozen ids as the first "
             "and the last one. frame_pool: of rows on a device. frozen_ids: a set of frozen ids, which rise.")
        .def_prop_ro("state_dim", &TableConfig::state_dim, "Number of floats of optimizer state in a row.");
}

} // namespace satrap
