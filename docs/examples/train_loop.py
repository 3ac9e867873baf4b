from bagelplane.client import PackedLoader

loader = PackedLoader()  # finds the sidecar; rank and world size from torch.distributed or the environment
for step, batch in zip(range(10), loader):  # batches never end: here we take ten
    print(step, batch["sequence_length"], batch["packed_text_ids"].shape)  # train here
print("to checkpoint:", len(str(loader.state_dict())), "characters of state")
