"""Drives the unmodified langchain-e2b on a sandbox; fails at the first difference."""

import e2b
from langchain_e2b import E2BSandbox

sandbox = e2b.Sandbox.create(timeout=120)
backend = E2BSandbox(sandbox=sandbox)
assert backend.execute("pwd; whoami").output == "/home/user\nuser\n"
assert backend.write("/home/user/a.txt", "one\ntwo\n").error is None
assert "two" in str(backend.read("/home/user/a.txt"))
assert backend.edit("/home/user/a.txt", "two", "three").error is None
assert "a.txt" in str(backend.ls("/home/user"))
assert "a.txt" in str(backend.grep("three", "/home/user"))
assert "a.txt" in str(backend.glob("*.txt", "/home/user"))
assert backend.upload_files([("/home/user/b.bin", bytes(range(256)))])[0].error is None
assert backend.download_files(["/home/user/b.bin"])[0].content == bytes(range(256))
assert backend.execute("sudo id -u").output.strip() == "0"
sandbox.kill()
print("all passed")
