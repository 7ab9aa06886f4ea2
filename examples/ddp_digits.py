"""Trains a classifier of drawn digits with DDP on the zpccl backend: about ten seconds on CPUs.

    torchrun --nproc-per-node 2 examples/ddp_digits.py

Only two lines differ from a program for Gloo: the import, and the name of the backend. With `--backend gloo` and two
ranks, it prints the same losses and saves the same weights, bit for bit. Needs torch and rich: pip install
'.[torch,examples]'.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zpccl.torch  # noqa: F401, registers the backend.

GLYPHS = (  # Five by three pixels each, row by row.
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001"),
    *("111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111"),
)
SIDE = 12


def draw(count: int, seed: int, device: str = "cpu") -> TensorDataset:
    """Digits at random positions in small images, with noise. They are the same on any device."""
    random = torch.Generator().manual_seed(seed)
    glyphs = torch.tensor([[float(pixel) for pixel in glyph] for glyph in GLYPHS]).view(10, 5, 3)
    labels = torch.randint(10, (count,), generator=random)
    images = 0.4 * torch.randn(count, 1, SIDE, SIDE, generator=random)
    rows = torch.randint(SIDE - 4, (count,), generator=random)
    columns = torch.randint(SIDE - 2, (count,), generator=random)
    for image, label, row, column in zip(images, labels, rows, columns, strict=True):
        image[0, row : row + 5, column : column + 3] += 2 * glyphs[label]
    return TensorDataset(images.to(device), labels.to(device))


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 5, padding=2),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * (SIDE // 2) ** 2, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="zpccl", help="of torch.distributed (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (default %(default)s)")
    parser.add_argument("--samples", type=int, default=8000, help="digits to train on (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the model: cpu or cuda (default %(default)s)")
    parser.add_argument("--save", metavar="FILE", help="where rank 0 saves the weights")
    options = parser.parse_args()

    torch.set_num_threads(1)  # Ranks share the cores. More threads also sum in another order from run to run.
    dist.init_process_group(options.backend)
    rank = dist.get_rank()
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    model = DistributedDataParallel(make_model().to(options.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    digits = draw(options.samples, 1, options.device)
    sampler = DistributedSampler(digits, seed=2)
    loader = DataLoader(digits, batch_size=32, sampler=sampler)
    begun = time.monotonic()
    bar = Progress(transient=True, disable=rank != 0 or not sys.stdout.isatty())
    shown = bar.add_task("batches", total=options.epochs * len(loader))
    bar.start()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=options.device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            bar.advance(shown)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.9f}", flush=True)
    bar.stop()
    if rank == 0:
        images, labels = draw(1000, 3, options.device).tensors
        accuracy = (model.module(images).argmax(1) == labels).double().mean().item()
        took = time.monotonic() - begun
        print(f"accuracy {accuracy:.1%} after {took:.1f} s on {dist.get_world_size()} ranks of {options.backend}")
        if options.save:
            torch.save(model.module.state_dict(), options.save)
    dist.barrier()  # Gloo may abort a process that exits (a thread frees its last call). By then all is saved.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
