"""What a block costs on a mesh: memory of a device, bytes on each wire, time of each stage; nothing is compiled.

    seconds = layers * sum over stages of max(flops / rate, bytes of device memory / rate), or of bytes / rate of a wire

The bytes on wires are those of the compiled program (`moax.inspect`); of `one_sided`, whose kernel moves the rows that
there are, they are those of the balanced load. The times are of the balanced load at rates that kernels reach, with
nothing overlapped and without launch latency. Compare meshes by them, and measure the mesh that you choose.
"""

from moax.estimate.hardware import HARDWARE as HARDWARE
from moax.estimate.hardware import Hardware as Hardware
from moax.estimate.memory import Memory as Memory
from moax.estimate.report import Estimate as Estimate
from moax.estimate.report import estimate as estimate
from moax.estimate.report import sweep as sweep
from moax.estimate.times import Stage as Stage
from moax.estimate.wires import Transfer as Transfer
from moax.models import MODELS as MODELS
