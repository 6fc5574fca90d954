"""What outlives the process: values as bytes (`encoding`), and folders of consistent cuts of a stream (`cuts`)."""
