// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/lab"
)

var (
	killsWanted     = flag.Int("kills.count", 4, "how often TestKillsUnderManyConnections kills a balancer's process")
	connectionCount = flag.Int("kills.connections", 1000, "how many connections TestKillsUnderManyConnections keeps open")
)

// manyThink is the time between two requests on each of very many connections.
const manyThink = 4 * time.Second

// spurious is the permitted number of needless retransmissions that no receiver has reported. An
// interruption of a millisecond would lose more packets, and the counters show every lost packet.
const spurious = 5

// TestKillsUnderManyConnections kills the balancers' processes repeatedly: while they run, while
// they reload and while they start. It also lets one build take over from another. No connection
// breaks, every packet passes a data path, and none is lost.
func TestKillsUnderManyConnections(t *testing.T) {
	t.Parallel()
	needRoot(t)
	builds := &builds{path: filepath.Join(t.TempDir(), "segue"), all: []string{segue, otherBuild(t)}}
	must(t, builds.install(0))
	l := upWith(t, topology(mixed...), builds.path)
	passed := restingCounts(t, l)
	live := openResting(t, l, *connectionCount, manyThink, l.Topology.Services...)
	visitors := startVisitors(t, l, 1, l.Topology.Services...)

	before, start := tcpCounts(t, l), time.Now()
	killAgainAndAgain(t, l, builds, *killsWanted)
	live.rounds(t, 1)
	visitors.more(t, 50)
	lasted := time.Since(start)
	killed := tcpCounts(t, l).since(before)
	live.requireUnbroken(t)
	visitors.requireContent(t)

	before = tcpCounts(t, l)
	select { // wait for the same time without kills
	case <-time.After(lasted):
	case <-t.Context().Done():
	}
	control := tcpCounts(t, l).since(before)
	t.Logf("%v with %d kills: %+v; without: %+v", lasted, *killsWanted, killed, control)
	if killed.lost > control.lost+spurious || killed.resets > control.resets {
		t.Errorf("more was lost in %v with kills, %+v, than without, %+v", lasted, killed, control)
	}
	live.requireUnbroken(t)
	requireNoDrops(t, l)
	for _, name := range nodes(l, lab.RoleBalancer) {
		if n := packetCounts(t, l.Node(name))["forward_recover"]; n > 0 {
			t.Errorf("%s forgot flows: it placed %d of their packets anew", name, n)
		}
	}
	live.stop()
	visitors.stop()
	requireAllDelivered(t, l)
	requireAllCounted(t, l, passed)
}

// killAgainAndAgain kills the processes of all balancers in turn, n times in total, and leaves them
// running.
func killAgainAndAgain(t *testing.T, l *lab.Lab, builds *builds, n int) {
	t.Helper()
	names := nodes(l, lab.RoleBalancer)
	longest := restart(t, l.Process(names[0], "lb"))
	for killed := 1; killed < n; {
		name := names[killed%len(names)]
		lb := l.Process(name, "lb")
		switch killed % 3 {
		case 0: // while the process runs
		case 1: // while the process reloads
			cfg := l.Node(name).BalancerConfig()
			setWeight(&cfg, "s1", rand.Uint32N(4))
			setWeight(&cfg, "s2", 1+rand.Uint32N(4))
			must(t, l.Node(name).WriteBalancerConfig(cfg))
			must(t, lb.Signal(unix.SIGHUP))
			pause(t, rand.N(longest/2))
		case 2: // while the process starts, perhaps as the other build
			must(t, lb.Kill())
			must(t, builds.install(rand.IntN(len(builds.all))))
			ctx, cancel := context.WithTimeout(t.Context(), rand.N(longest))
			if err := lb.Start(ctx); err != nil && ctx.Err() == nil {
				t.Fatal(err)
			}
			cancel()
			killed++
		}
		must(t, builds.install(rand.IntN(len(builds.all))))
		restart(t, lb)
		killed++
	}
	for i := range builds.all { // each build takes over from the other, as in an upgrade
		must(t, builds.install(i))
		var tags []string
		for _, name := range names {
			must(t, l.Process(name, "lb").Stop())
			must(t, l.Process(name, "lb").Start(t.Context()))
			tags = append(tags, programTag(t, l.Node(name)))
		}
		builds.check(t, i, tags)
	}
}

// restart kills a process and starts it again. It returns the time until the process is ready.
func restart(t *testing.T, p *lab.Process) time.Duration {
	t.Helper()
	must(t, p.Kill())
	start := time.Now()
	must(t, p.Start(t.Context()))
	return time.Since(start)
}

// pause waits for a time, so that a kill hits a random moment.
func pause(t *testing.T, d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// builds are executables that are installed in turn at one path.
type builds struct {
	path string
	all  []string
	tags [2]string // tags of their programs
}

// install installs a build at the path, in place of the other.
func (b *builds) install(i int) error {
	next := b.path + ".next"
	if err := os.Symlink(b.all[i], next); err != nil {
		return err
	}
	return os.Rename(next, b.path)
}

// check fails the test unless a build always has the same programs, and the other build has
// different ones.
func (b *builds) check(t *testing.T, i int, tags []string) {
	t.Helper()
	b.tags[i] = tags[0]
	for _, tag := range tags {
		if tag == "" || tag != b.tags[i] || tag == b.tags[1-i] {
			t.Errorf("build %d runs the programs %v; those of all builds are %v", i, tags, b.tags)
		}
	}
}

// programTag returns the kernel's hash of the program that a balancer has attached.
func programTag(t *testing.T, n *lab.Node) string {
	t.Helper()
	return status(t, n).Program.Tag
}

// otherBuild returns a build of segue with a different program for the balancer: the same source and
// tables, compiled differently.
func otherBuild(t *testing.T) (path string) {
	t.Helper()
	path, err := buildOther()
	must(t, err)
	return path
}

// buildOther makes the build once for all tests, beside segue.
var buildOther = sync.OnceValues(func() (path string, err error) {
	path = segue + "-other"
	object, overlay := path+".o", path+".json"
	embedded, err := filepath.Abs("../../internal/balancer/dataplane/balancer_bpfel.o")
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace": {%q: %q}}`, embedded, object), 0o644); err != nil {
		return "", err
	}
	args := append(strings.Fields(os.Getenv("BPF2GO_CFLAGS")), "-Os", "-g", "-target", "bpf",
		"-I../../bpf", "-c", "../../bpf/balancer/balancer.bpf.c", "-o", object)
	for _, command := range [][]string{
		append([]string{cmp.Or(os.Getenv("BPF2GO_CC"), "clang")}, args...),
		{"go", "build", "-buildvcs=false", "-overlay", overlay, "-o", path, "../../cmd/segue"},
	} {
		if out, err := exec.CommandContext(interrupted, command[0], command[1:]...).CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", strings.Join(command, " "), err, out)
		}
	}
	return path, nil
})

// tcp holds TCP counters, summed over the client and all servers.
type tcp struct {
	// lost is the number of retransmitted segments without those that had arrived, because the
	// machine is busy. The receiver reports the latter (RFC 2883, duplicate selective
	// acknowledgements).
	lost     int64
	resent   int64
	timeouts int64
	resets   int64 // resets that were sent
}

func (a tcp) since(b tcp) tcp {
	return tcp{a.lost - b.lost, a.resent - b.resent, a.timeouts - b.timeouts, a.resets - b.resets}
}

func tcpCounts(t *testing.T, l *lab.Lab) (sum tcp) {
	t.Helper()
	for _, n := range l.Nodes {
		if n.Role != lab.RoleClient && n.Role != lab.RoleServer {
			continue
		}
		snmp, netstat := protocolCounts(t, n, "snmp"), protocolCounts(t, n, "netstat")
		resent := snmp["Tcp:RetransSegs"]
		sum.resent += resent
		sum.lost += resent - netstat["TcpExt:TCPDSACKRecv"] - netstat["TcpExt:TCPDSACKOfoRecv"]
		sum.timeouts += netstat["TcpExt:TCPTimeouts"]
		sum.resets += snmp["Tcp:OutRsts"]
	}
	return sum
}

// netFile reads a file of a node's /proc/net.
func netFile(t *testing.T, n *lab.Node, name string) (lines []string) {
	t.Helper()
	must(t, n.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/" + name)
		lines = strings.Split(strings.TrimSpace(string(text)), "\n")
		return err
	}))
	return lines
}

// protocolCounts reads counters from pairs of lines: one of names and one of values.
func protocolCounts(t *testing.T, n *lab.Node, file string) map[string]int64 {
	t.Helper()
	all := map[string]int64{}
	lines := netFile(t, n, file)
	for i := 0; i+1 < len(lines); i += 2 {
		names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
		for j := 1; j < len(names); j++ {
			value, err := strconv.ParseInt(values[j], 10, 64)
			must(t, err)
			all[names[0]+names[j]] = value
		}
	}
	return all
}

// path counts packets at several points on their path through a balancer.
type path struct {
	arrived uint64 // packets that arrived at its interface
	counted uint64 // packets that its program counted
	dropped uint64 // packets that its interface or the fabric's port dropped
}

// pathCounts reads the counters of all balancers.
func pathCounts(t *testing.T, l *lab.Lab) map[string]path {
	t.Helper()
	all := map[string]path{}
	for _, name := range nodes(l, lab.RoleBalancer) {
		port, own := interfaceCounts(t, l.Node("fabric"), name), interfaceCounts(t, l.Node(name), "eth0")
		all[name] = path{
			arrived: port.sent, counted: packetCounts(t, l.Node(name)).sum(),
			dropped: port.dropped + own.dropped,
		}
	}
	return all
}

// restingCounts returns pathCounts at a moment when no packets are between the interface's counter
// and the program's. It reads until two readings are equal.
func restingCounts(t *testing.T, l *lab.Lab) map[string]path {
	t.Helper()
	counts := pathCounts(t, l)
	eventually(t, func() error {
		before := counts
		if counts = pathCounts(t, l); !maps.Equal(before, counts) {
			return fmt.Errorf("packets are on their way: %v, then %v", before, counts)
		}
		return nil
	})
	return counts
}

type traffic struct{ sent, dropped uint64 }

// interfaceCounts reads the counters of an interface.
func interfaceCounts(t *testing.T, n *lab.Node, name string) traffic {
	t.Helper()
	for _, line := range netFile(t, n, "dev") {
		fields := strings.Fields(line)
		if fields[0] != name+":" {
			continue
		}
		number := func(i int) uint64 {
			value, err := strconv.ParseUint(fields[i], 10, 64)
			must(t, err)
			return value
		}
		return traffic{sent: number(10), dropped: number(3) + number(4) + number(11) + number(12)}
	}
	t.Fatalf("%s has no %s", n.Name, name)
	return traffic{}
}

// requireAllCounted fails the test unless every packet that has arrived at a balancer since before
// reached its program, and none was dropped.
func requireAllCounted(t *testing.T, l *lab.Lab, before map[string]path) {
	t.Helper()
	eventually(t, func() error {
		for name, now := range pathCounts(t, l) {
			then := before[name]
			if now.arrived-then.arrived != now.counted-then.counted || now.dropped != then.dropped {
				return fmt.Errorf("%s: %d packets arrived, the program met %d, %d were dropped before or after", name,
					now.arrived-then.arrived, now.counted-then.counted, now.dropped-then.dropped)
			}
		}
		return nil
	})
}
