"""Faults of real training scripts: what people write, and what they should write. None changes what is learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")
"""The script without any fault."""

EPOCH_STEPS = 8
"""Batches in an epoch of the script."""


@dataclass(frozen=True)
class Fault:
    """Something that costs time and changes nothing else.

    `place` is where the time goes: ``"loading"``, the rest of the ``"loop"``, or ``"GPU"`` if only with a GPU, where
    host and GPU wait for each other. `diff` has the lines of `SCRIPT` that go (``-``) and what people write (``+``), as
    in a unified diff, with empty lines between pieces. Each piece is in the script exactly once.
    """

    name: str
    place: str
    mark: str  # a function that the fault calls more often, or less often
    why: str  # what it costs, and what to do instead, in a sentence
    notebook: str  # that explains it, without ``.ipynb``
    finding: str | None  # what `diagnosis.diagnose` calls it, at least with a GPU; None if it cannot see it
    diff: str

    @property
    def edits(self) -> list[tuple[str, str]]:
        """Pieces of the script, as they should be and as people write them."""
        pieces = [piece.splitlines() for piece in self.diff.strip("\n").split("\n\n")]
        right, wrong = (
            ["".join(f"{line[1:]}\n" for line in piece if line[0] in kind) for piece in pieces] for kind in (" -", " +")
        )
        return list(zip(right, wrong, strict=True))

    def put_into(self, script: str) -> str:
        """Return a script with this fault."""
        for right, wrong in self.edits:
            script = script.replace(right, wrong)
        return script

    def fits_beside(self, other: Fault) -> bool:
        """Whether a script can have both: neither changes a line that the other is about."""
        script = SCRIPT.read_text(encoding="utf-8")
        pairs = (self, other), (other, self)
        return all(right in first.put_into(script) for first, second in pairs for right, _ in second.edits)


WORKERS = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__"  # once for each start of all workers

FAULTS = (
    Fault(
        "no workers", "loading", WORKERS,
        "The loop makes each batch itself and does not train meanwhile; workers load in the background.",
        "03-more-workers", "loading in the loop itself", """
-import os

-        num_workers=min(4, os.cpu_count()),
-        persistent_workers=True,
+        num_workers=0,
"""),
    Fault(
        "workers restarted every epoch", "loading", WORKERS,
        "Epochs are short here, and each begins with new workers and empty queues; persistent workers go on.",
        "03-more-workers", "workers restarted every epoch", """
-        persistent_workers=True,
"""),
    Fault(
        "decoded twice", "loading", "PIL.ImageFile.ImageFile.load",
        "The file is opened and decoded for its size, then opened and decoded once more; once is enough.",
        "01-first-profile", "decoding at every read", """
+        size = Image.open(path).convert("RGB").size
+        if size != (32, 32):
+            raise ValueError(f"{path}: expected 32 × 32 pixels, found {size}")
         image = Image.open(path).convert("RGB")
-        if image.size != (32, 32):
-            raise ValueError(f"{path}: expected 32 × 32 pixels, found {image.size}")
"""),
    Fault(
        "enlarged and shrunk", "loading", "PIL.Image.Image.resize",
        "Left over from another network, for 224 × 224 pixels: it costs time, and the image stays the same.",
        "05-preprocess-ahead", "resizing at every read", """
+        image = image.resize((224, 224), Image.NEAREST).resize((32, 32), Image.NEAREST)
         return TO_TENSOR(image), label
"""),
    Fault(
        "normalized image by image", "loading", "torchvision.transforms.functional.to_tensor",
        "A CPU core makes floats of each image; the network can do it for the whole batch at once on its device.",
        "04-normalize-on-device", "transforms of each image", """
-TO_TENSOR = transforms.PILToTensor()
+TO_TENSOR = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

-        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))
-        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1))

-        images = (images / 255 - self.mean) / self.std
"""),
    Fault(
        "pixels copied row by row", "loading", "torch.from_numpy",
        "A loop in Python over the rows of an image; one call of a library does the same.",
        "04-normalize-on-device", "the dataset's own work", """
 from pathlib import Path
-
+
+import numpy as np

-from torchvision import transforms

-TO_TENSOR = transforms.PILToTensor()

-        return TO_TENSOR(image), label
+        pixels, rows = torch.empty(3, 32, 32, dtype=torch.uint8), np.array(image)
+        for y in range(32):
+            pixels[:, y] = torch.from_numpy(rows[y]).T
+        return pixels, label
"""),
    Fault(
        "batch made of lists", "loading", "torch.Tensor.tolist",
        "Each pixel becomes a Python number, then a pixel again; PyTorch's own function copies whole images.",
        "06-packed-formats", "collating item by item", """
+def collate(items):
+    images = [image.tolist() for image, label in items]
+    labels = [label for image, label in items]
+    return torch.tensor(images, dtype=items[0][0].dtype), torch.tensor(labels)
+
+
 def make_loader():

         batch_size=BATCH,
+        collate_fn=collate,
"""),
    Fault(
        "rows taken from a data frame", "loading", "pandas.Series.__getitem__",
        "pandas makes a new object for each row that is read; a list or an array gives what is there.",
        "03-more-workers", "the dataset's own work", """
-import csv

+import pandas as pd
 import torch

-        with open(folder / "labels.csv", newline="", encoding="utf-8") as file:
-            rows = list(csv.DictReader(file))[:count]
-        self.paths = [folder / row["file"] for row in rows]
-        self.labels = [int(row["label"]) for row in rows]
+        self.table = pd.read_csv(folder / "labels.csv", nrows=count)

-        return len(self.paths)
+        return len(self.table)

-        path, label = self.paths[index], self.labels[index]
+        row = self.table.iloc[index]
+        path, label = DATA / row["file"], int(row["label"])
"""),
    Fault(
        "checkpoint in every step", "loop", "torch.save",
        "All weights are written to the disk after each batch; once an epoch suffices.",
        "18-your-own-code", None, """
-        torch.save(model.state_dict(), CHECKPOINT)
+            torch.save(model.state_dict(), CHECKPOINT)
"""),
    Fault(
        "anomaly detection left on", "loop", "torch.autograd.detect_anomaly.__init__",
        "It records where each operator was called, and searches each gradient for NaN; use it only for a search.",
        "12-fewer-launches", None, """
-    logits = model(images)
-    loss = nn.functional.cross_entropy(logits, labels)
-    loss.backward()
+    with torch.autograd.detect_anomaly():
+        logits = model(images)
+        loss = nn.functional.cross_entropy(logits, labels)
+        loss.backward()
"""),
    Fault(
        "profiler left on", "loop", "torch.profiler.profile.start",
        "With stacks it records every call of a Python function; profile some steps, and then stop.",
        "01-first-profile", None, """
     model, optimizer = make_model()
+    profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
+    profiler.start()

+    profiler.stop()
-
+
-
+
 if __name__ == "__main__":
"""),
    Fault(
        "histograms of all weights in every step", "loop", "torch.Tensor.histogram",
        "All weights are copied to the host and counted after each batch; once an epoch suffices.",
        "18-your-own-code", None, """
+    histograms = []
     for epoch in range(epochs):

             right += correct
+            weights = [weight.detach().cpu() for weight in model.parameters()]
+            histograms.append([weight.histogram(50) for weight in weights])
"""),
    Fault(
        "accuracy counted image by image", "loop", "torch.Tensor.__bool__",
        "Each class of each image takes some operators and a wait for the GPU; compare whole tensors, and sum.",
        "08-host-and-device", "a synchronization in every step", """
-    correct = (logits.argmax(1) == labels).sum()
+    correct = 0
+    for scores, label in zip(logits, labels):
+        best = 0
+        for index in range(len(scores)):
+            if scores[index] > scores[best]:
+                best = index
+        if best == label:
+            correct += 1
"""),
    Fault(
        "loss printed in every step", "GPU", "torch.Tensor.item",
        "To read the loss, the host waits for the GPU, and then the GPU for the host; read it now and then.",
        "08-host-and-device", "a synchronization in every step", """
+    print(f"loss {loss.item():.3f}")
     return loss.detach(), correct
"""),
    Fault(
        "copies from pageable memory", "GPU", "torch.Tensor.pin_memory",
        "The host waits until each copy has been made; from pinned memory it goes on, and launches the step meanwhile.",
        "03-more-workers", "pageable copies", """
-        pin_memory=torch.cuda.is_available(),

-    images = images.to(device, non_blocking=True)
-    labels = labels.to(device, non_blocking=True)
+    images = images.to(device)
+    labels = labels.to(device)
"""),
    Fault(
        "optimizer weight by weight", "GPU", "torch.Tensor.zero_",
        "It runs one kernel or more for each weight tensor, not one for all; PyTorch's own choice is faster.",
        "12-fewer-launches", "launch-bound steps", """
-    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
+    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

-    optimizer.zero_grad()
+    optimizer.zero_grad(set_to_none=False)
"""),
    Fault(
        "gradients' norms read one by one", "GPU", "torch.Tensor.item",
        "The host waits for the GPU once for each tensor of weights; sum on the GPU, and read now and then.",
        "08-host-and-device", "a synchronization in every step", """
+    norm = sum(weight.grad.norm().item() ** 2 for weight in model.parameters()) ** 0.5
+    if norm > 100:
+        print(f"large gradients: {norm:.0f}")
     optimizer.step()
"""),
)  # fmt: skip
