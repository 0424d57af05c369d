"""Adult census income: predicts from a person's answers whether they earn more than 50,000 dollars a year.

The data is next to this file (CC BY 4.0, see data/adult/README.md). The script trains a DLRM in a plain PyTorch loop
and prints the validation AUC, on the data's test file. `--run FOLDER` saves checkpoints there and resumes from the
newest; `--record FOLDER` records there what `satrap report FOLDER` makes a page of. The same script runs under `satrap
run`, with any number of servers, workers and trainers, which records by itself.
"""

import argparse
import time
from pathlib import Path

import torch

import satrap

FOLDER = Path(__file__).parent / "data" / "adult"
CATEGORIES = ("workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country")
NUMBERS = ("age", "education_num", "hours_per_week", "capital_gain", "capital_loss")
BATCH_SIZE = 256  # for all trainers together
COLUMNS = """age workclass fnlwgt education education_num marital_status occupation relationship race sex capital_gain
    capital_loss hours_per_week native_country income"""


def main() -> None:
    """Train and validate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--run", help="folder or URL for checkpoints")
    parser.add_argument("--record", help="folder for the record from which `satrap report` makes a page")
    args = parser.parse_args()

    torch.manual_seed(0)
    names = (*CATEGORIES, "age_id", "hours_id")
    tables = {name: satrap.Table(name, dim=16, optimizer=satrap.Adagrad(lr=0.05)) for name in names}
    embeddings = satrap.Embeddings(tables, staleness=args.staleness)
    trainers = embeddings.trainers
    data = satrap.CSV(
        FOLDER / "adult.data.gz",
        columns=COLUMNS.split(),
        strip=True,
        missing="?",
        dense=[satrap.DenseColumn(name, log1p=True) for name in NUMBERS],
        label="income",
        label_true=(">50K", ">50K."),  # the test file ends its labels with a dot
        ids={"age_id": "age", "hours_id": "hours_per_week"},  # their effect is not linear, so they are ids as well
        batch_size=max(1, BATCH_SIZE // trainers.world_size),
        shuffle=True,
        epochs=args.epochs,
    )
    model = embeddings.parallel(satrap.models.DLRM(len(NUMBERS), embeddings, bottom=(64,), top=(128, 64, 1)))
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    run = satrap.Checkpoint(args.run, model, optimizer, embeddings, data) if args.run else None
    if run is not None and run.resume():
        print(f"continues after step {embeddings.step:,}")

    sinks = [satrap.Screen()] if trainers.rank == 0 else []
    with satrap.Progress(embeddings, sinks=sinks, record=args.record, settings=vars(args)) as progress:
        for batch in embeddings.stream(data):
            logits = model(batch.dense, batch.embeddings)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.step(batch, loss=loss, scores=logits)
            if run is not None:
                run.save(every_steps=100)
        if run is not None:
            run.save(every_steps=1)  # no effect if the last step is already saved
        embeddings.eval()
        model.eval()
        validation = data.replace(path=FOLDER / "adult.test.gz", shuffle=False, epochs=1)
        start = time.monotonic()
        auc = satrap.auc(model, embeddings.stream(validation))  # every trainer reads the whole file
        progress.report_evaluation(embeddings.step, {"AUC": auc}, seconds=time.monotonic() - start)
    if trainers.rank == 0:
        rows = sum(map(len, embeddings.tables.values()))
        print(f"{embeddings.step:,} steps, {rows:,} rows; validation AUC {auc:.4f}")


if __name__ == "__main__":
    main()
