"""Uses libraries that people train with, each where it has threads; prints what came of it."""

import accelerate
import datasets
import lightning.pytorch
import numpy
import pandas
import pyarrow.compute
import scipy.linalg
import tokenizers
import torch
import torchmetrics
import transformers
from sklearn.cluster import KMeans

square = numpy.arange(250000.0).reshape(500, 500) % 97 + 500 * numpy.eye(500)
print("numpy", (square @ square).sum())
print("scipy", round(float(scipy.linalg.solve(square, numpy.ones(500)).sum()), 6))
frame = pandas.DataFrame({"key": numpy.arange(100000) % 7, "value": numpy.arange(100000.0)})
print("pandas", frame.groupby("key").value.mean().tolist())
# On Arrow's own threads.
print("pyarrow", pyarrow.Table.from_pandas(frame).group_by("key").aggregate([("value", "sum")]).sort_by("key")[1])
centres = KMeans(2, n_init=1, random_state=0).fit(numpy.repeat([[0.0, 0.0], [9.0, 9.0]], 500, axis=0)).cluster_centers_
print("scikit-learn", sorted(centres.tolist()))
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
print("tokenizers", sum(sum(found.ids) for found in tokenizer.encode_batch(["a b c"] * 1000)))
texts = datasets.Dataset.from_dict({"text": ["a b"] * 8}).map(lambda row: {"ids": tokenizer.encode(row["text"]).ids})
print("datasets", texts[7])
print("accelerate", accelerate.Accelerator(cpu=True).device)
torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
)
print("transformers", round(float(model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss), 5))
print("torchmetrics", float(torchmetrics.MeanMetric()(torch.tensor([1.0, 3.0]))))


class Layer(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.pytorch.Trainer(
    max_steps=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
layer = Layer()
trainer.fit(layer, torch.utils.data.DataLoader(torch.ones(12, 1), batch_size=4))
print("lightning", trainer.global_step, round(layer.layer.weight.item(), 5))
