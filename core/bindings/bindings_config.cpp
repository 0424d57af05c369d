// The Python binding of a table's configuration: the flat attributes of satrap._core.TableConfig.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/named_config.hpp"

namespace nb = nanobind;
using namespace satrap;

void bind_config(nb::module_& m) {
    nb::class_<NamedConfig> config(m, "TableConfig", "One table's configuration, flat; made from a satrap.Table.");
    config.def(nb::init<>())
        .def_rw("name", &NamedConfig::name)
        .def_rw("dtype", &NamedConfig::dtype)
        .def_rw("optimizer", &NamedConfig::optimizer)
        .def_rw("initial", &NamedConfig::initial)
        .def_rw("admission", &NamedConfig::admission)
        .def_rw("on_full", &NamedConfig::on_full)
        .def_rw("absent", &NamedConfig::absent)
        .def_rw("on_nonfinite", &NamedConfig::on_nonfinite);
    auto field = [&](const char* name, auto member) {
        using Value = std::remove_reference_t<decltype(std::declval<TableConfig&>().*member)>;
        config.def_prop_rw(
            name, [member](const NamedConfig& c) { return c.values.*member; },
            [member](NamedConfig& c, Value v) { c.values.*member = v; });
    };
    field("dim", &TableConfig::dim);
    field("initial_a", &TableConfig::initial_a);
    field("initial_b", &TableConfig::initial_b);
    field("probability", &TableConfig::probability);
    field("min_count", &TableConfig::min_count);
    field("first_epoch_only", &TableConfig::first_epoch_only);
    field("window", &TableConfig::window);
    field("capacity", &TableConfig::capacity);
    field("expire_after", &TableConfig::expire_after);
    field("num_buckets", &TableConfig::num_buckets);
    auto optimizer = [&](const char* name, auto member) {
        using Value = std::remove_reference_t<decltype(std::declval<OptimizerConfig&>().*member)>;
        config.def_prop_rw(
            name, [member](const NamedConfig& c) { return c.values.optimizer.*member; },
            [member](NamedConfig& c, Value v) { c.values.optimizer.*member = v; });
    };
    optimizer("lr", &OptimizerConfig::lr);
    optimizer("momentum", &OptimizerConfig::momentum);
    optimizer("nesterov", &OptimizerConfig::nesterov);
    optimizer("weight_decay", &OptimizerConfig::weight_decay);
    optimizer("initial_accumulator_value", &OptimizerConfig::initial_accumulator_value);
    optimizer("eps", &OptimizerConfig::eps);
    optimizer("beta1", &OptimizerConfig::beta1);
    optimizer("beta2", &OptimizerConfig::beta2);
    optimizer("ftrl_beta", &OptimizerConfig::ftrl_beta);
    optimizer("l1", &OptimizerConfig::l1);
    optimizer("l2", &OptimizerConfig::l2);
    config.def_prop_ro(
        "state_dim", [](const NamedConfig& c) { return c.resolve().state_dim(); },
        "Number of floats of optimizer state in a row.");
}
