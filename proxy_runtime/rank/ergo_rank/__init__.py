"""What is injected into a rank: a CUDA device whose memory and execution live in a device proxy.

The only package of Ergosphere that a user's process can import. It has no API for users.
"""

from __future__ import annotations


def autoload() -> None:
    """Entry point of the group ``torch.backends``: torch calls it at the end of ``import torch``.

    Does nothing in a process that is not a rank, e.g. a child that a rank has spawned.
    """
    from ergo_rank import boot

    if boot.channel is not None or boot.tree is not None:
        import sysconfig

        import torch

        boot.require_torch(torch.__version__, str(sysconfig.get_config_var("SOABI")))
        from ergo_rank import device

        device.install(boot.channel, boot.tree)
