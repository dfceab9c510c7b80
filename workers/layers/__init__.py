"""The parts of a decoder, split over the ranks: each layer holds its shard and knows where it lies in a checkpoint."""
