"""Plans for machines that are not alike: shares of a batch and cuts of a pipeline by the speed of the ranks."""
