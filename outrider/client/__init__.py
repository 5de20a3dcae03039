"""The client library: needs neither torch nor any service's code.

    from outrider.client import Client

    with Client("127.0.0.1:7700") as client:
        print(client.generate("def fibonacci(n):", max_tokens=64, temperature=0.7, seed=1).text)
        for event in client.stream("def fibonacci(n):", max_tokens=64):
            ...

`AsyncClient` is the same for asyncio. Streams survive the loss of the connection or the orchestrator: their
events continue with the same tokens. Errors are those of `outrider.protocol.errors`.
"""

from outrider.client.aio import AsyncClient
from outrider.client.blocking import Client
from outrider.client.conversation import Message, Tool, ToolCall
from outrider.client.request import Options, Prompt, Request
from outrider.client.results import (
    Chunk,
    Complete,
    Event,
    Generation,
    Load,
    Model,
    ModelInfo,
    Result,
    Started,
    Step,
    StepNode,
    TimelineEvent,
    TokenLogprob,
    Tokens,
    Usage,
)
from outrider.client.retries import NEVER, Retries
from outrider.client.survival import Broken

__all__ = [
    "NEVER",
    "AsyncClient",
    "Broken",
    "Chunk",
    "Client",
    "Complete",
    "Event",
    "Generation",
    "Load",
    "Message",
    "Model",
    "ModelInfo",
    "Options",
    "Prompt",
    "Request",
    "Result",
    "Retries",
    "Started",
    "Step",
    "StepNode",
    "TimelineEvent",
    "TokenLogprob",
    "Tokens",
    "Tool",
    "ToolCall",
    "Usage",
]
