import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor(index * index)


if __name__ == "__main__":
    print([batch.tolist() for batch in DataLoader(Squares(), batch_size=2, num_workers=2)])
