"""The cost of MoE blocks on a mesh: the memory of a device, the bytes of each collective, and the time.

    seconds = operations / rate of matmuls + bytes of device memory / its rate + bytes of collectives / rate of a link

`estimate` traces `moax.moe` and its gradient on a mesh of described GPUs. It needs no GPU, and compiles nothing. The
bytes are those of the block itself. The times assume a balanced load and no overlap: compare meshes by them.
"""

from moax.estimate.cost import estimate as estimate
from moax.estimate.hardware import HARDWARE as HARDWARE
from moax.estimate.hardware import RESERVE as RESERVE
from moax.estimate.hardware import Hardware as Hardware
from moax.estimate.result import Estimate as Estimate
from moax.estimate.result import Memory as Memory
from moax.estimate.result import Once as Once
from moax.estimate.result import SavedArray as SavedArray
