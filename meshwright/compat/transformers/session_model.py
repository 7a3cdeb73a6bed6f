"""`SessionModel`: what Trainer calls as its model. Calls go to the session, everything else to the user's model."""

from typing import Any

from torch import nn

from meshwright.train.session import Session


class SessionModel(nn.Module):
    """The user's model under a plan. Its parameters are those that this rank holds."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.module = session.module
        self._session = session

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._session.model(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)  # such as `config`
