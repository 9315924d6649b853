// A rank's device state to files and back.
#pragma once

#include <string>

#include "collective_bridge.hpp"
#include "process_state.hpp"
#include "rank_state.hpp"
#include "store.hpp"

namespace ergo::device {

namespace splice {
class Splicer;
}

struct SnapshotServices {
  DeviceBackend& backend;
  ProcessState& process;
  CollectiveBridge& collectives;
  splice::Splicer* splicer = nullptr;  // where ranks share the device, else null
};

// Writes both files and returns the size of the storages file in bytes. `store`: given for the rank whose
// proxy keeps the rendezvous store. Throws ControlError("device-proxy.dump").
uint64_t dump_rank(SnapshotServices services, RankState& rank, const KeyValueStore* store, const std::string& meta_path,
                   const std::string& storages_path);

// Fills a fresh rank. Throws ControlError("device-proxy.meta", "device-proxy.storages").
void load_rank(SnapshotServices services, RankState& rank, KeyValueStore* store, const std::string& meta_path,
               const std::string& storages_path);

}  // namespace ergo::device
