"""Inside the shim of a part of a fleet's job; from outside it is `proxy_runtime.shim.part_client`."""
