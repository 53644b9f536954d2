"""An emulated accelerator: a torch device that is not the CPU but computes on it.

`from tests.devices.emulation import emulated` registers the devices emul:0 and emul:1, for which
`kernels.support.runtime` returns a module like torch.cuda. On a machine without a GPU it detects operators that
mix devices, values read on the host, unordered work of two streams, events of another device, numbers frozen in a
graph, replays that use freed or unwritten memory, and the damage of a failed capture. Tests in other folders
import the fixture `accelerator`: `from tests.devices.conftest import accelerator`.

    emulated.py   tensors and operators           order.py    the order of work, and waits of the host
    transfers.py  copies from and to the host     streams.py  streams and events
    capture.py    graphs, as tapes                memory.py   allocated, cached and freed memory
    ledger.py     counters for tests to read      runtime.py  torch.emul, and `restore()` before each test
    fused.py      the hash of random numbers as one operator, for tests that need it often

It cannot detect problems of:
- CUDA, Triton or NVML themselves: `why_unavailable` sends every part to torch, so no kernel runs;
- speed: every operator takes 0.01 ms of its stream, and a wait of the host takes no time;
- unfinished work: every operator is computed immediately. Work that two streams do without synchronisation is
  recorded as a race, but its values are never wrong;
- rounding: the bits are the CPU's;
- memory freed on one stream while another uses it; blocks shared by captures of one pool; fragmentation;
- captures that fork to a second stream, or wait for an event from outside;
- pinned memory: a non-blocking copy to the host arrives when the host waits for it, whatever memory it goes to,
  and a non-blocking copy to the device counts as "queued";
- autograd, and a second process. Once the module is imported, torch takes "emul" for the machine's accelerator:
  a process forked after a backward pass cannot run one itself.
"""
