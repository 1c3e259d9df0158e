"""Threads, forks, spawned processes, and what importing loads. Processes that could hang run under a timeout."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from dispatch_helpers import flagos, manager_of, reference, silu, vendor

from vllm_fl.dispatch import OpManager, PolicyManager, SelectionPolicy, set_global_policy

HERE = Path(__file__).parent
PRELUDE = """
import os, sys, threading, time
sys.path.insert(0, {here!r})
from dispatch_helpers import manager_of, reference, silu, vendor
from vllm_fl.dispatch import *
from vllm_fl.dispatch import discovery
from vllm_fl.plugins import loading
loading.entry_points = discovery.entry_points = lambda **_: []
set_global_policy(SelectionPolicy())

def in_child(check):
    pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child failed"
"""


def run(code: str, timeout: float = 60) -> str:
    script = PRELUDE.format(here=str(HERE)) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, vllm_fl, vllm_fl.dispatch;"
        "print(sorted({'torch', 'vllm', 'pydantic', 'numpy', 'yaml', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_dispatch_works_without_torch() -> None:
    assert run("""
        sys.modules["torch"] = None
        manager = manager_of(vendor("acme", "attention_backend", lambda: "acme"),
                             reference("attention_backend", lambda use_mla=False, use_sparse=False: "reference"))
        print(manager.call("attention_backend"), manager.call("attention_backend", use_mla=True))
    """).split() == ["acme", "reference"]  # fmt: skip


def test_fork_while_other_threads_hold_every_lock() -> None:
    """A thread registers, another resolves, a third changes the policy; all of them sleep inside their locks."""
    run("""
        from vllm_fl.dispatch.default import adopt_default_manager
        manager = manager_of(reference("silu_and_mul", silu("reference")))
        adopt_default_manager(manager)
        inside = threading.Barrier(4)
        release = threading.Event()

        def register():
            with manager.registry.transaction("slow"):
                manager.registry.register_impl(vendor("half", "silu_and_mul", silu("half")))
                inside.wait()
                release.wait()

        def resolve():
            with manager._lock, manager.failure_log._lock, manager.observers._lock:
                inside.wait()
                release.wait()

        def policy():
            from vllm_fl.dispatch.default import _default
            with PolicyManager.get_instance()._lock, _default.lock:
                inside.wait()
                release.wait()

        threads = [threading.Thread(target=t) for t in (register, resolve, policy)]
        for thread in threads:
            thread.start()
        inside.wait()

        def check():
            bound = bind("silu_and_mul")
            assert bound(1) == call_op("silu_and_mul", 1) == "reference", "half a transaction is not seen"
            manager.registry.register_impl(vendor("acme", "silu_and_mul", silu("acme")))
            assert bound(1) == "acme"
            with with_preference("reference"):
                assert bound(1) == "reference"
            set_global_policy(SelectionPolicy(prefer="reference"))
            assert bound(1) == "reference"
            manager.count_calls()
            bound(1)
            assert manager.call_counts() == {("silu_and_mul", "reference.torch"): 1}
            reset_default_manager()
            get_default_manager()

        in_child(check)
        release.set()
        for thread in threads:
            thread.join()
        assert manager.call("silu_and_mul", 1) == "half"
    """)


def test_forked_child_resolves_afresh_and_registers_nothing_twice() -> None:
    out = run("""
        class Point:
            name, value, dist = "acme", "acme:register", None
            def load(self):
                def register(registry):
                    print("registered in", "parent" if os.getpid() == parent else "child", flush=True)
                    fn = silu("served")
                    fn._is_available = lambda: print("probed in", "parent" if os.getpid() == parent else "child",
                                                     flush=True) or True
                    registry.register_impl(vendor("acme", "silu_and_mul", fn))
                return register

        parent = os.getpid()
        discovery.entry_points = lambda group: [Point()] if group == "vllm_fl.plugin" else []
        call_op("silu_and_mul", 1)
        in_child(lambda: call_op("silu_and_mul", 1))
        in_child(lambda: call_op("silu_and_mul", 1))
        call_op("silu_and_mul", 1)
    """)
    assert out.splitlines() == ["registered in parent", "probed in parent", "probed in child", "probed in child"]


def test_fork_before_initialisation_is_done() -> None:
    """The child of a process whose other thread was registering starts again, and keeps what was registered whole."""
    out = run("""
        entered, release = threading.Event(), threading.Event()

        class Point:
            dist = None
            def __init__(self, name, slow):
                self.name = self.value = name
                self.slow = slow
            def load(self):
                def register(registry):
                    registry.register_impl(vendor(self.name, "silu_and_mul", silu(self.name)))
                    if self.slow and os.getpid() == parent:
                        entered.set()
                        release.wait()
                return register

        parent = os.getpid()
        points = [Point("a", False), Point("b", True)]
        discovery.entry_points = lambda group: points if group == "vllm_fl.plugin" else []
        thread = threading.Thread(target=lambda: call_op("silu_and_mul", 1))
        thread.start()
        entered.wait()

        def check():
            print([i.impl_id for i in get_default_manager().resolve_candidates("silu_and_mul")], flush=True)
            print(get_discovered_plugins(), flush=True)

        in_child(check)
        release.set()
        thread.join()
    """)
    assert out.splitlines() == [
        "['vendor.b', 'vendor.a']",
        "[('a', 'entry_point', True), ('b', 'entry_point', True)]",
    ]


def test_fork_inside_a_context() -> None:
    run("""
        manager = manager_of(vendor("acme", "silu_and_mul", silu("acme")), reference("silu_and_mul", silu("reference")))
        bound = manager.bind("silu_and_mul")
        started, release = threading.Event(), threading.Event()

        def other():
            with with_preference("reference"):
                started.set()
                release.wait()

        thread = threading.Thread(target=other)
        thread.start()
        started.wait()
        with with_preference("reference"):
            with with_preference("vendor"):
                def check():
                    assert bound(1) == "acme"
                    assert PolicyManager.get_instance().contexts_open == 2
                in_child(check)
            assert bound(1) == "reference"
        release.set()
        thread.join()
        assert bound(1) == "acme"
        assert PolicyManager.get_instance().contexts_open == 0
    """)


def test_spawned_process_starts_from_scratch(tmp_path: Path) -> None:
    """A bound operator travels by name; nothing of the registry does."""
    module = tmp_path / "acme_spawned.py"
    module.write_text(
        textwrap.dedent("""
            from dispatch_helpers import silu, vendor

            def register_builtins(registry):
                registry.register_impl(vendor("acme", "silu_and_mul", silu("served")))

            def work(bound):
                return bound(1)
        """)
    )
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(f"""
            import multiprocessing, os, sys
            sys.path[:0] = [{str(HERE)!r}, {str(tmp_path)!r}]
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
            os.environ["VLLM_FL_PLUGIN_MODULES"] = "acme_spawned"
            import acme_spawned
            from vllm_fl.dispatch import bind

            if __name__ == "__main__":
                bound = bind("silu_and_mul")
                assert bound(1) == "served"
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.apply(acme_spawned.work, (bound,)))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "served"


def test_threads_register_and_resolve_at_once() -> None:
    manager = manager_of(reference("silu_and_mul", silu(0)))
    bound = manager.bind("silu_and_mul")
    start = threading.Barrier(6, timeout=30)
    problems: list[BaseException] = []

    def guard(work):  # type: ignore[no-untyped-def]
        def body() -> None:
            start.wait()
            try:
                work()
            except BaseException as error:
                problems.append(error)

        return body

    def register(offset: int):  # type: ignore[no-untyped-def]
        def work() -> None:
            for index in range(offset, 60, 2):
                manager.registry.register_impl(vendor(f"v{index}", "silu_and_mul", silu(index), priority=100 + index))

        return work

    def call() -> None:
        last = -1
        while last < 59:
            answer = bound(1)
            assert answer == 0 or answer >= last or answer >= 58, "a better implementation was forgotten"
            last = max(last, answer)
            assert manager.call("silu_and_mul", 1) >= 0
            manager.selection("silu_and_mul").explain()

    def change() -> None:
        for _ in range(20):
            set_global_policy(SelectionPolicy(prefer="vendor"))
            manager.clear_failed_impls()

    works = [register(0), register(1), call, call, call, change]
    threads = [threading.Thread(target=guard(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert problems == []
    assert len(manager.resolve_candidates("silu_and_mul")) == 61
    assert bound(1) == 59


def test_first_call_from_many_threads_initialises_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def register(manager: OpManager) -> None:
        calls.append(1)
        manager.registry.register_impl(flagos("silu_and_mul", silu("served")))

    monkeypatch.setattr("vllm_fl.dispatch.manager.register_everything", register)
    manager = OpManager()
    start = threading.Barrier(8, timeout=30)
    answers = []

    def work() -> None:
        start.wait()
        answers.append(manager.call("silu_and_mul", 1))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == ["served"] * 8
    assert calls == [1]


class Listener:
    """What the policy sees of a manager."""

    def refuse_if_frozen(self, action: str) -> None:
        pass

    def policy_changed(self) -> None:
        pass


def test_managers_come_and_go_while_the_policy_asks_them() -> None:
    policies = PolicyManager.get_instance()
    present = [Listener() for _ in range(200)]
    for listener in present:
        policies.subscribe(listener)
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            present[:] = [Listener() for _ in range(200)]
            for listener in present:
                policies.subscribe(listener)

    thread = threading.Thread(target=come_and_go)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            policies._refuse_if_frozen("test")
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
