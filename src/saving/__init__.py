"""What outlives the process: values as bytes (`encoding`), and folders of snapshots of a stream (`snapshots`)."""
