// Builds a template with E2B's SDK for Node, boots it, and prints what it found as JSON.
import { Sandbox, Template } from "e2b"

const before = await Template.exists("node-template")
const template = Template({ fileContextPath: "." })
  .fromImage("ubuntu:22.04")
  .copy("a.txt", "/opt/a.txt")
  .setEnvs({ WHO: "node" })
  .runCmd("echo $WHO > who; whoami >> who; pwd >> who")
await Template.build(template, "node-template")
const after = await Template.exists("node-template")
const tags = (await Template.getTags("node-template")).map((one) => one.tag)
const sandbox = await Sandbox.create("node-template")
const { stdout } = await sandbox.commands.run("cat /opt/a.txt ~/who")
await sandbox.kill()
console.log(JSON.stringify({ before, after, stdout, tags }))
