"""The gateway: OpenAI's HTTP in front, schedulers asked over gRPC, engines' answers passed on byte by byte."""
