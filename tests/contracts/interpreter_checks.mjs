// Drives the unmodified @e2b/code-interpreter; prints one JSON object.
import { Sandbox } from '@e2b/code-interpreter'

const found = {}
const sandbox = await Sandbox.create({ timeoutMs: 180_000 })
await sandbox.runCode('x = 1')
found.state = (await sandbox.runCode('x += 1; x')).text
const lines = []
const streamed = await sandbox.runCode('import sys\nprint("out", flush=True)\nprint("err", file=sys.stderr)\n"text"', {
  onStdout: (line) => lines.push(line.line),
  onStderr: (line) => lines.push(line.line),
})
found.lines = lines.sort()
found.text = streamed.text
const failed = await sandbox.runCode('1/0')
found.error = [failed.error.name, failed.error.value, failed.error.traceback.includes('ZeroDivisionError')]
const drawn = await sandbox.runCode('import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()')
found.png = Buffer.from(drawn.results[0].png, 'base64').subarray(1, 4).toString()
found.html = (await sandbox.runCode('import pandas as pd\npd.DataFrame({"a": [1]})')).results[0].html.includes('<table')
found.env = (await sandbox.runCode('import os; os.environ["A"]', { envs: { A: 'b' } })).text
const context = await sandbox.createCodeContext({ cwd: '/tmp' })
found.context = (await sandbox.runCode('import os; os.getcwd()', { context })).text
found.contexts = (await sandbox.listCodeContexts()).length
await sandbox.runCode('y = 1', { context })
await sandbox.restartCodeContext(context)
found.restarted = (await sandbox.runCode('y', { context })).error.name
await sandbox.removeCodeContext(context)
found.removed = (await sandbox.listCodeContexts()).length
await sandbox.kill()
console.log(JSON.stringify(found))
