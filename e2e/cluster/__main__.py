import sys
import node
if sys.argv[1]=="up": node.up(True)
elif sys.argv[1]=="down": node.down()
else:
    import subprocess
    sys.exit(subprocess.call(node.command(*sys.argv[2:]), env=node.environment()))
