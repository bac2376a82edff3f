import sys, tempfile, time, collections, traceback
from .simulation import Simulation
from .engine import Violation

def main():
    a, b = int(sys.argv[1]), int(sys.argv[2]); count = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    t0 = time.time(); steps = 0; faults = collections.Counter(); moves=collections.Counter(); cells=set(); bad=collections.Counter(); deaths=0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for seed in range(a, b):
            sim = Simulation(seed, folder, count=count)
            try:
                sim.live()
            except Violation as v:
                bad[v.law] += 1
                print("seed", seed, v, v.deal)
                if "-v" in sys.argv:
                    for t in sim.trace:
                        if v.deal is None or t[2] == v.deal: print(f"{t[0]-1790000000:10.1f} [{t[1]}] {t[3]}")
            except BaseException:
                print("seed", seed); traceback.print_exc()
                if "-v" in sys.argv: return 1
            steps += sim.steps; faults += sim.faults; moves += sim.moves; cells |= sim.cells; deaths += sim.deaths
    dt = time.time() - t0
    print(f"{(b-a)*count} deals {steps} steps {deaths} deaths {dt:.1f}s {dt/(b-a)/count*1000:.1f} ms/deal; cells {len(cells)}")
    print(dict(moves)); print(dict(faults)); print(dict(bad))
