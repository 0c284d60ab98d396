"""Whether the container images build and run, alone, under Compose and as pods (`make docker-check`)."""
