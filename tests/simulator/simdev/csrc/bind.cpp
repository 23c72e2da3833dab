// Python bindings, kept free of torch/extension.h for the sake of build time.
#include "generators.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

namespace py = pybind11;
using namespace sim;

PYBIND11_MODULE(_sim_C, m) {
  using nogil = py::call_guard<py::gil_scoped_release>;
  m.def("configure", [](const py::dict& d) {
    auto& s = settings();
    for (auto item : d) {
      const auto k = item.first.cast<std::string>();
      auto v = item.second;
      if (k == "devices") {
        s.devices = v.cast<int>();
        if (s.devices < 0 || s.devices > kMaxDevices)
          throw py::value_error("devices: 0 to 8");
      } else if (k == "align") s.align = v.cast<size_t>();
      else if (k == "queued_copies") s.queued_copies = v.cast<bool>();
      else if (k == "queued_kernels") s.queued_kernels = v.cast<bool>();
      else if (k == "poison") s.poison = v.cast<bool>();
      else if (k == "sanitize") s.sanitize = v.cast<bool>();
      else if (k == "copy_delay_ms") s.copy_delay_ms = v.cast<double>();
      else if (k == "h2d_gbps") s.gbps[H2D] = v.cast<double>();
      else if (k == "d2h_gbps") s.gbps[D2H] = v.cast<double>();
      else if (k == "d2d_gbps") s.gbps[D2D] = v.cast<double>();
      else if (k == "h2d_latency_us") s.latency_us[H2D] = v.cast<double>();
      else if (k == "d2h_latency_us") s.latency_us[D2H] = v.cast<double>();
      else if (k == "d2d_latency_us") s.latency_us[D2D] = v.cast<double>();
      else throw py::key_error(k);
    }
  });
  m.def("settings", [] {
    auto& s = settings();
    py::dict d;
    d["devices"] = s.devices; d["align"] = s.align; d["queued_copies"] = s.queued_copies;
    d["queued_kernels"] = s.queued_kernels; d["poison"] = s.poison; d["sanitize"] = s.sanitize;
    d["copy_delay_ms"] = s.copy_delay_ms;
    d["h2d_gbps"] = s.gbps[H2D]; d["d2h_gbps"] = s.gbps[D2H]; d["d2d_gbps"] = s.gbps[D2D];
    d["h2d_latency_us"] = s.latency_us[H2D]; d["d2h_latency_us"] = s.latency_us[D2H];
    d["d2d_latency_us"] = s.latency_us[D2D];
    return d;
  });
  m.def("set_capacity", [](int d, size_t n) { check_device(d); set_capacity(d, n); });
  m.def("capacity", [](int d) { check_device(d); return capacity(d); });
  m.def("device_count", [] { return settings().devices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("synchronize", [](int d) { synchronize(d); raise_pending(d); }, nogil());
  m.def("reset", &reset, nogil());
  m.def("launch_count", &launch_count);
  m.def("default_stream_id", [](int d) { return stream(d, 0).id; });
  m.def("num_ooms", [](int d) { check_device(d); return stats(d).num_ooms; });
  m.def("link_stats", [](int d) {
    check_device(d);
    py::dict out;
    const char* names[] = {"h2d", "d2h", "d2d"};
    for (int k = 0; k < 3; ++k) {
      auto s = link_stats(d, Dir(k));
      py::dict one;
      one["bytes"] = s.bytes; one["copies"] = s.copies;
      one["queued"] = s.queued; one["busy_s"] = s.busy_s;
      out[names[k]] = one;
    }
    return out;
  });
  m.def("reset_link_stats", &reset_link_stats);
  m.def("take_hazards", &take_hazards);
  m.def("op_count", &op_count);
  m.def("forked", &forked);
  m.def("default_generator", [](int d) {
    return py::reinterpret_steal<py::object>(
        THPGenerator_initDefaultGenerator(default_generator(d)));
  });
}
