"""Uses torchvision: its operators, its decoder, a model, and a data set in loader processes; prints what came of it."""

import torch
import torchvision
from torchvision.transforms import v2

torch.manual_seed(0)
boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [1.0, 1.0, 9.0, 9.0], [20.0, 20.0, 29.0, 29.0]])
print("nms", torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist())
image = (torch.arange(3 * 64 * 64).reshape(3, 64, 64) % 251).to(torch.uint8)
print("resize", int(v2.functional.resize(image, [32, 32]).sum()))
coded = torchvision.io.encode_jpeg(image)
print("jpeg", len(coded), int(torchvision.io.decode_jpeg(coded).sum()))
loss = torchvision.models.resnet18(num_classes=3)(torch.ones(2, 3, 64, 64)).sum()
loss.backward()
print("resnet", round(loss.item(), 4))
data = torchvision.datasets.FakeData(8, (3, 16, 16), 2, v2.PILToTensor())
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
print("loader", sum(int(images.sum()) for images, _ in loader))
