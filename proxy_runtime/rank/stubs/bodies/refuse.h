// What every stub library shares. A function without a body jumps to ergo_refuse_entry with its own address;
// what happens then is the library's policy, chosen when it is compiled:
//   ERGO_ABORT    one sentence on stderr and abort(): a result of this library cannot be faked
//   ERGO_RECORD   the call is recorded in the cudart stub (sticky error, counted) and returns ERGO_CODE
//   ERGO_DECLINE  returns ERGO_CODE and nothing else: tools that can do without
#pragma once

#define ERGO_EXPORT __attribute__((visibility("default")))

// Called by the trampoline with the address of the stub function that was called; returns its result.
__attribute__((visibility("hidden"))) long ergo_refuse(const void* stub);

// Records one refused call: the error becomes sticky, the call is counted. `name` must stay valid.
// Defined by the cudart stub; the driver stub finds it there.
void ergo_stub_record(const char* name);
