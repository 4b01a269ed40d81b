"""From a Question to its answer: by the record, by a search, and by a wider one where nothing fits as it was asked."""
