"""How a program of moax runs: which devices JAX starts on, what an error prints, and with which code it exits.

exit code   meaning
0           The program succeeded.
1           The program cannot run on this machine.
2           An argument is wrong.
130         Ctrl-C stopped the program.
141         The reader of its output is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from moax import extras
from moax.errors import Unsupported


def run(name: str, act: Callable[[], int], *, traceback: bool = False) -> int:
    """Calls `act()`, and prints an expected error in one line as `NAME: error: MESSAGE`.

    Args:
      name: the program as the user typed it, such as `moax train`.
      act: does the work and returns the exit code.
      traceback: raise an expected error, so that Python shows where it arose.

    Returns:
      The exit code.
    """
    try:
        code = act()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # The reader is gone, as in `moax info | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more when it ends.
        return leave(141)
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return leave(130)
    except Exception as error:
        if traceback or (explained := explain(error)) is None:
            raise
        message, code = explained
        print(f"{name}: error: {message}", file=sys.stderr)
        return leave(code)


def explain(error: Exception) -> tuple[str, int] | None:
    """Returns (message, exit code) of an error that the user can mend; None for a bug, which keeps its traceback."""
    if isinstance(error, ModuleNotFoundError):
        message = extras.hint(error)
        return None if message is None else (message, 1)
    if isinstance(error, ValueError | Unsupported | OSError) or _is_of_jax(error):
        code = 2 if isinstance(error, ValueError) else 1
        return f"{str(error).strip() or type(error).__name__}{hint(error)}", code
    return None


def start(cpu_devices: int | None = None) -> None:
    """Starts JAX.

    Args:
      cpu_devices: JAX runs on this many emulated CPU devices; None leaves the choice of devices to JAX.

    Raises:
      Unsupported: JAX has no device to run on.
      ValueError: `emulate` refuses the number.
    """
    import jax

    if cpu_devices is not None:
        emulate(cpu_devices)
    try:
        jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that this machine has a platform it was told to use.
        why = str(error).strip() or f"this machine has none of the platforms {jax.config.jax_platforms}"
        raise Unsupported(f"JAX cannot start: {why}") from error


def emulate(count: int) -> None:
    """Makes JAX run on `count` emulated CPU devices. The call must come before JAX runs anything.

    Raises:
      ValueError: `count` is below 1, or JAX already runs on another number of devices.
    """
    import jax

    if count < 1:
        raise ValueError(f"--cpu-devices {count} must be at least 1")
    # With many devices on few cores, a rendezvous may take longer than the 40 seconds after which XLA gives up.
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=600".strip()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started already; the next line counts its devices.
    if (running := jax.local_device_count()) != count:
        raise ValueError(f"--cpu-devices {count}: JAX already runs in this process, on {running} devices")


def leave(code: int) -> int:
    """Returns `code` to exit with in a single process; among several processes it ends this one at once.

    An orderly exit would wait for all processes, and those that still run would wait for this one.
    """
    if _is_one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def hint(error: Exception) -> str:
    """Returns the end of the message of a JAX runtime error among several processes; "" for other errors."""
    several = _is_of_jax(error) and _is_one_of_several()
    return "; another process may have ended: see its output" if several else ""


def _is_of_jax(error: Exception) -> bool:
    """Returns whether the JAX runtime raised the error, for want of memory, of a device or of a peer."""
    if "jax" not in sys.modules:
        return False
    from jax.errors import JaxRuntimeError

    return isinstance(error, JaxRuntimeError)


def _is_one_of_several() -> bool:
    """Returns whether this process is one of several of a JAX program."""
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()
