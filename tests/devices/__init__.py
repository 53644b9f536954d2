"""An accelerator that isn't one: a device that computes on the CPU but is not the CPU.

`from tests.devices.emulation import emulated` makes the device "emul" (emul:0 and emul:1), and
`kernels.support.runtime` of it a module of torch.cuda's shape. On it, what a machine without a GPU can't
otherwise show is shown: operators that mix devices, values read on the host, work of two streams that nothing
orders, events of another device, what a graph freezes, memory that a replay finds gone or unwritten, and what a
capture that fails leaves behind. A test of another folder that uses it takes its fixture: `from
tests.devices.conftest import accelerator`.

    emulated.py   tensors and operators           order.py    who comes after whom, and what the host waits for
    transfers.py  copies from and to the host     streams.py  streams and events
    capture.py    graphs, as tapes                memory.py   what is allocated, kept, and gone
    ledger.py     what a test may look at         runtime.py  torch.emul, and `restore()` before each test

What it can't show:
- anything of CUDA, Triton or NVML themselves; `why_unavailable` sends every part to torch, so kernels are not run;
- times: an operator takes 0.01 ms of its stream, whatever it does, and a wait of the host takes none;
- work that is still running: all is done at once, so a missing order is noted, but the values are right;
- bits that differ from the CPU's;
- memory that is freed on one stream while another uses it; blocks that captures of one pool share; fragments;
- captures that fork to a second stream, or wait for an event from outside;
- pinned memory: a copy to the host that does not block arrives when the host waits for it, whatever memory it
  goes to, and one to the device is counted as "queued";
- autograd, and a second process. While the module is imported torch takes "emul" for the machine's accelerator: a
  process that is forked after a backward pass can't make one.
"""
