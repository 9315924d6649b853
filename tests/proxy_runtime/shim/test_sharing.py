"""What a part's proxies tell of ranks that share a device: summed over the devices that several ranks are on."""

from __future__ import annotations

from types import SimpleNamespace

from model.sharing import SharingIncidents
from proxy_runtime.device.errors import DeviceProxyError
from proxy_runtime.shim.parts.sharing import SharingWatch


class Proxy:
    def __init__(self, time_limits: int, mismatches: int = 0, unshared: tuple[str, ...] = ()) -> None:
        self.splice = {"timeouts": time_limits, "mismatches": mismatches, "unshared": list(unshared)}
        self.asked = 0
        self.gone = False

    def stats(self, *, deadline_s: float):
        self.asked += 1
        if self.gone:
            raise DeviceProxyError("It is gone.", code="device-proxy.gone")
        return {"splice": self.splice}


def generation(*proxies: Proxy, placement: tuple[int, ...], pack: str = "rank") -> SimpleNamespace:
    ranks = [SimpleNamespace(rank=rank) for rank in range(len(placement))]
    return SimpleNamespace(
        spec=SimpleNamespace(pack=pack), placement=placement, ranks=ranks, proxies=dict(enumerate(proxies))
    )


def test_devices_with_several_ranks_are_asked_and_summed():
    shared, alone, other = Proxy(2, 1, ("aten::mm",)), Proxy(5), Proxy(1, 1, ("aten::add", "aten::mm"))
    watch = SharingWatch()
    watch.look(generation(shared, alone, other, placement=(0, 0, 1, 2, 2)))
    assert watch.found == SharingIncidents(3, 2, ("aten::add", "aten::mm"))
    assert alone.asked == 0


def test_nothing_is_none_and_a_tree_is_not_asked():
    calm, tree = Proxy(0), Proxy(3)
    watch = SharingWatch()
    watch.look(generation(calm, placement=(0, 0)))
    watch.look(generation(tree, placement=(0, 0), pack="node"), now=True)
    assert watch.found is None and (calm.asked, tree.asked) == (1, 0)


def test_a_proxy_is_not_asked_again_at_once_and_one_that_is_gone_has_said_what_it_said():
    proxy = Proxy(1)
    part, watch = generation(proxy, placement=(0, 0)), SharingWatch()
    watch.look(part)
    proxy.splice["timeouts"] = 4
    watch.look(part)
    assert watch.found == SharingIncidents(1) and proxy.asked == 1
    proxy.gone = True
    watch.look(part, now=True)
    assert watch.found == SharingIncidents(1)
    proxy.gone = False
    watch.look(part, now=True)
    assert watch.found == SharingIncidents(4)
