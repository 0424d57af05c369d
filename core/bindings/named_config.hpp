// A table's configuration as Python spells it: names instead of enums. resolve() checks them and returns a TableConfig.
#pragma once

#include <initializer_list>
#include <utility>

#include "base/errors.hpp"
#include "base/table_config.hpp"

namespace satrap {

template <typename Choice>
Choice choose(const std::string& field, const std::string& found,
              std::initializer_list<std::pair<const char*, Choice>> known) {
    std::string names;
    for (const auto& [name, value] : known) {
        if (found == name) return value;
        names += (names.empty() ? "'" : ", '") + std::string(name) + "'";
    }
    throw InputError(field + "='" + found + "' is not known; expected one of " + names);
}

// The attributes of satrap._core.TableConfig: names instead of enums, so that Python needs none of ours.
struct NamedConfig {
    std::string name, dtype = "float32", optimizer = "adagrad", initial = "uniform", admission = "always",
                      on_full = "evict", absent = "initial", on_nonfinite = "raise";
    TableConfig values;

    TableConfig resolve() const {
        TableConfig config = values;
        config.name = name;
        config.dtype = choose<Dtype>(
            "dtype", dtype, {{"float32", Dtype::float32}, {"float16", Dtype::float16}, {"bfloat16", Dtype::bfloat16}});
        config.optimizer.kind = choose<OptimizerKind>("optimizer", optimizer,
                                                      {{"sgd", OptimizerKind::sgd},
                                                       {"adagrad", OptimizerKind::adagrad},
                                                       {"rowwise_adagrad", OptimizerKind::rowwise_adagrad},
                                                       {"adam", OptimizerKind::adam},
                                                       {"adamw", OptimizerKind::adamw},
                                                       {"ftrl", OptimizerKind::ftrl}});
        config.initial = choose<InitialKind>(
            "initial", initial,
            {{"uniform", InitialKind::uniform}, {"normal", InitialKind::normal}, {"constant", InitialKind::constant}});
        config.admission = choose<AdmissionKind>("admission", admission,
                                                 {{"always", AdmissionKind::always},
                                                  {"probability", AdmissionKind::probability},
                                                  {"min_count", AdmissionKind::min_count}});
        config.on_full = choose<OnFull>("on_full", on_full,
                                        {{"evict", OnFull::evict}, {"raise", OnFull::raise}, {"grow", OnFull::grow}});
        config.absent = choose<Absent>("absent", absent, {{"initial", Absent::initial}, {"zeros", Absent::zeros}});
        config.on_nonfinite = choose<OnNonfinite>("on_nonfinite", on_nonfinite,
                                                  {{"raise", OnNonfinite::raise}, {"skip", OnNonfinite::skip}});
        if (config.dim < 1 || config.dim > 65536)
            throw InputError("table '" + name + "': dim=" + std::to_string(config.dim) + ", expected 1..65536");
        if (!std::has_single_bit(config.num_buckets) || config.num_buckets > 65536)
            throw InputError("table '" + name + "': num_buckets=" + std::to_string(config.num_buckets) +
                             ", expected a power of two up to 65536");
        if (config.capacity != 0 && config.capacity < config.num_buckets)
            throw InputError("table '" + name + "': capacity=" + std::to_string(config.capacity) +
                             " is below num_buckets=" + std::to_string(config.num_buckets));
        if (config.capacity != 0 && (config.capacity - 1) / config.num_buckets >= kMostBucketRows)
            throw InputError("table '" + name + "': capacity=" + std::to_string(config.capacity) + " is above " +
                             std::to_string(kMostBucketRows) +
                             " rows for each of num_buckets=" + std::to_string(config.num_buckets));
        return config;
    }
};

} // namespace satrap
