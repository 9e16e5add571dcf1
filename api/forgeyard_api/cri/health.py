"""Whether the runtimes of a server are well, asked within a second, of all at once."""

from __future__ import annotations

import asyncio
from typing import Final

from forgeyard_api.cri.messages import cri
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.capabilities import ExecutorCapabilities, Feature
from forgeyard_model.errors import ForgeyardError

ASK_SECONDS: Final = 1.0

_Answer = ExecutorCapabilities | ForgeyardError


class Health:
    """Asks the executors of a table what they can do. A question that hangs is not asked again beside itself."""

    def __init__(self, table: AttemptTable) -> None:
        self._table = table
        self._asking: dict[str, asyncio.Task[_Answer]] = {}

    async def conditions(self) -> tuple[list[cri.RuntimeCondition], dict[str, str]]:
        """The two conditions that clients want, and a word on each runtime."""
        tasks = {name: self._ask(name) for name in self._table.executors}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=ASK_SECONDS)
        answers = {name: task.result() if task.done() else None for name, task in tasks.items()}
        well = [answer for answer in answers.values() if isinstance(answer, ExecutorCapabilities)]
        words = {name: _word(answer) for name, answer in answers.items()}
        told = "; ".join(f"{name}: {word}" for name, word in words.items())
        draining = self._table.draining
        networks = any(answer.has(Feature.NETWORK_NAMESPACE) for answer in well)
        return [
            cri.RuntimeCondition(
                type="RuntimeReady",
                status=bool(well) and not draining,
                reason="Draining" if draining else "RuntimeAnswers" if well else "NoRuntimeAnswers",
                message="this host takes no more attempts in" if draining else told,
            ),
            cri.RuntimeCondition(
                type="NetworkReady",
                status=networks,
                reason="NetworkPerAttempt" if networks else "NoNetworkNamespaces",
                message="each attempt is given its own" if networks else told,
            ),
        ], words

    def _ask(self, name: str) -> asyncio.Task[_Answer]:
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.get_running_loop().create_task(self._answer(name))
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        return task

    async def _answer(self, name: str) -> _Answer:
        try:
            return await self._table.executors[name].capabilities()
        except ForgeyardError as error:
            return error


def _word(answer: _Answer | None) -> str:
    if answer is None:
        return "no answer yet"
    return "ready" if isinstance(answer, ExecutorCapabilities) else str(answer)
