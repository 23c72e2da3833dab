"""torch.compile of a dispatched model, in a process where nothing has imported the compiler before."""

import subprocess
import sys

SCRIPT = """
import copy, torch
from torch import nn
from bigmodel.dispatch import MappingStore, dispatch

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

plain = Model()
model = copy.deepcopy(plain)
dispatch(model, {"": "disk"}, main_device=torch.device("cpu"), store=MappingStore(plain.state_dict(), kind="disk"))
compiled = torch.compile(model, backend="eager")
x = torch.randn(2, 8)
with torch.no_grad():
    for _ in range(3):
        assert torch.equal(compiled(x), plain(x))
print("equal")
"""


def test_compiled_from_the_first_forward_on():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
