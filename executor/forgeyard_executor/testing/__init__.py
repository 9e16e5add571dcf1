"""For people who test agents and schedulers against this executor: one that pretends, and what to assert of it.

    from forgeyard_executor.testing import FakeExecutor, FakeRun

    executor = FakeExecutor(lambda job: FakeRun(output=b"hello\\n", exit_code=3))
    async with executor.run(job) as execution:
        result = await execution.wait()

It keeps the contract of :mod:`forgeyard_executor.interface`, starts nothing, and needs neither root nor a kernel that
has what a sandbox is made of. docs/testing.md has the rest.
"""

from forgeyard_executor.testing.assertions import (
    assert_ended_once,
    assert_nothing_left,
    assert_same_contract,
    assert_sound,
    output_of,
)
from forgeyard_executor.testing.fake_executor import FakeExecutor
from forgeyard_executor.testing.fake_run import FakeRun, FakeService, FakeStep
from forgeyard_executor.testing.fake_runtime import FakeRuntime

__all__ = [
    "FakeExecutor",
    "FakeRun",
    "FakeRuntime",
    "FakeService",
    "FakeStep",
    "assert_ended_once",
    "assert_nothing_left",
    "assert_same_contract",
    "assert_sound",
    "output_of",
]
