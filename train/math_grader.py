"""Is one LaTeX expression equal to another? math-verify, asked in a process of its own.

sympy evaluates what it is given: `9^{9^{9^9}}`, `100000000!` or thirty nested braces, all of which a policy under training does
write, run for ever or fill the memory. math-verify's own time-outs are signals, which work in the main thread only and do not free
memory. So this file is also a program: the child reads `[gold, text]` as a JSON line, answers `true` or `false`, and is ended by
the kernel when one question takes more than CPU_SECONDS of processor time (not wall time, so that a busy machine grades alike) or
MEMORY_BYTES. The parent sees the end of the pipe, counts the answer as wrong and starts the next child when it is needed.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading

CPU_SECONDS = 2.0  # an ordinary question takes 1 to 200 ms
MEMORY_BYTES = 4 << 30  # of address space
MAX_CHARACTERS = 300  # of either expression; longer ones are not asked about

_lock = threading.Lock()  # one question at a time, from whatever thread
_child: subprocess.Popen[str] | None = None


@functools.lru_cache(maxsize=8192)  # the G samples of one prompt mostly say the same
def equivalent(gold: str, text: str) -> bool:
    """Whether math-verify holds LaTeX `text` to be equal to LaTeX `gold`. False for what cannot be parsed, is too long or never ends."""
    if max(len(gold), len(text)) > MAX_CHARACTERS:
        return False
    with _lock:
        child = _running_child()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps([gold, text]) + "\n")  # ASCII, so no text can break the line or the encoding
            child.stdin.flush()
            reply = child.stdout.readline()
        except OSError:  # the child ended
            reply = ""
        if not reply:
            stop()
        return reply.strip() == "true"


def _running_child() -> subprocess.Popen[str]:
    """The grading child, started on first use and after each death. Its import of sympy (about a second) is before its clock starts."""
    global _child
    if _child is None or _child.poll() is not None:
        stop()
        # By path and with -P: neither this package nor the user's working directory is on the child's import path, only site-packages.
        command = [sys.executable, "-P", os.path.abspath(__file__)]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C in the terminal is for the run to handle.
        _child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
        assert _child.stdout is not None
        if _child.stdout.readline().strip() != "ready":
            stop()
            raise RuntimeError("the math grader did not start: does `import math_verify` work in this environment?")
    return _child


def stop() -> None:
    """Ends the child, if there is one. The next question starts another."""
    global _child
    if _child is not None:
        _child.kill()
        _child.wait()
        for pipe in (_child.stdin, _child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # an unsent question in the buffer
                    pipe.close()
        _child = None


atexit.register(stop)


def _serve() -> None:
    """The child: answers questions from stdin until it closes."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import parse, verify

    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may pass for an answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF, left at its default, ends the process
        try:
            gold, text = (parse(f"\\boxed{{{part}}}", parsing_timeout=None) for part in json.loads(line))
            verdict = bool(verify(gold, text, timeout_seconds=None))
        except Exception:  # RecursionError, MemoryError and sympy's many
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print("true" if verdict else "false", file=answers, flush=True)


if __name__ == "__main__":
    _serve()
