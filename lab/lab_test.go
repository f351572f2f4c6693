// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestMain lets labs start the test binary on their nodes instead of segue.
func TestMain(m *testing.M) {
	// Arguments that are not test flags must not run the tests, because the tests would start the
	// binary again.
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
		err := segue(ctx, os.Args[1:])
		stop()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// segue runs one of the commands that labs start on their nodes, or builds a lab (up).
func segue(ctx context.Context, args []string) error {
	switch {
	case len(args) > 3 && args[1] == "udp-echo":
		var ports []uint16
		for _, arg := range args[3:] {
			port, err := strconv.ParseUint(arg, 10, 16)
			if err != nil {
				return err
			}
			ports = append(ports, uint16(port))
		}
		err := UDPEcho(ctx, args[2], ports)
		fmt.Println("asked to end")
		return err
	case len(args) == 3 && args[1] == "delay":
		return Delay(ctx, args[2])
	case len(args) == 3 && args[1] == "up":
		topology := bareTopology()
		topology.Name = args[2]
		_, err := Up(ctx, topology, Options{Progress: func(text string) { fmt.Println(text) }})
		return err
	}
	return fmt.Errorf("the test binary is no segue %s", args[0])
}

// bareTopology returns a small lab. Only the tests connect its servers with VIPs.
func bareTopology() Topology {
	t := DefaultTopology()
	t.Name = "test" + strconv.Itoa(os.Getpid()%100000)
	t.Servers = 2
	t.Bare = true
	return t
}

func needRoot(t *testing.T) {
	t.Helper()
	testhost.NeedNamespaces(t)
	testhost.NeedBPF(t)
}

// up builds a lab for the duration of a test.
func up(t *testing.T, topology Topology) *Lab {
	needRoot(t)
	if topology.Impair.Reorder.some() {
		testhost.NeedTUN(t)
	}
	l, err := Up(t.Context(), topology, Options{Progress: func(text string) { t.Log(text) }})
	testhost.Must(t, err)
	t.Cleanup(func() {
		err := l.Down()
		if err != nil && !errors.Is(err, ErrNotUp) { // the test may have removed it
			t.Error(err)
		}
	})
	return l
}

// machine is the state that labs could leave behind on the machine.
type machine struct {
	Namespaces, Mounts, Pins, State, Processes []string
	Sysctls                                    map[string]string
}

// readMachine reads everything of a lab on the machine, and the machine's own network sysctls.
func readMachine(t *testing.T, name string) machine {
	t.Helper()
	m := machine{Sysctls: make(map[string]string)}
	glob := func(pattern string) []string {
		paths, err := filepath.Glob(pattern)
		testhost.Must(t, err)
		return paths
	}
	m.Namespaces = glob("/run/netns/segue-" + name + "-*")
	m.Pins = glob("/sys/fs/bpf/segue/lab-" + name + "-*")
	m.State = glob("/run/segue/lab/" + name)
	mounts, err := os.ReadFile("/proc/self/mounts")
	testhost.Must(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, name) || strings.Contains(line, " /sys/fs/bpf ") {
			m.Mounts = append(m.Mounts, line)
		}
	}
	for _, path := range glob("/proc/[0-9]*/cmdline") {
		text, _ := os.ReadFile(path) // it may have ended
		if bytes.Contains(text, []byte("/run/segue/lab/"+name)) {
			m.Processes = append(m.Processes, string(text))
		}
	}
	err = filepath.WalkDir("/proc/sys/net", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Base(path) == "nf_conntrack_count" {
			return err
		}
		value, err := os.ReadFile(path)
		if err == nil { // some can only be written
			m.Sysctls[path] = string(value)
		}
		return nil
	})
	testhost.Must(t, err)
	return m
}

func TestDownLeavesTheMachineAsFound(t *testing.T) {
	topology := bareTopology()
	before := readMachine(t, topology.Name)
	l := up(t, topology)
	// Down must also remove a shell that somebody has opened in the lab, and a daemon's pin.
	shell := exec.Command("sleep", "1000")
	testhost.Must(t, l.Node("s1").Start(shell))
	pin := filepath.Join(pinRoot, l.Node("lb1").Instance(), "maps")
	testhost.Must(t, os.MkdirAll(pin, 0o755))
	during := readMachine(t, topology.Name)
	slices.Sort(during.Processes)
	masters := slices.Compact(during.Processes) // a worker starts with its master's name
	if len(during.Namespaces) != 7 || len(masters) != 2 || len(during.Pins) != 1 {
		t.Errorf("while it is up: %d namespaces, nginx masters %q, %d pins; want 7, 2, 1",
			len(during.Namespaces), masters, len(during.Pins))
	}
	if _, err := Up(t.Context(), topology, Options{}); err == nil || !strings.Contains(err.Error(), "is already up") {
		t.Errorf("second Up: %v", err)
	}
	testhost.Must(t, l.Down())
	if err := l.Down(); !errors.Is(err, ErrNotUp) {
		t.Errorf("Down of a lab that is down: %v", err)
	}
	if _, err := startTime(shell.Process.Pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the process in the lab still runs: %v", err)
		shell.Process.Kill()
	}
	shell.Wait()
	if diff := cmp.Diff(before, readMachine(t, topology.Name)); diff != "" {
		t.Errorf("machine (-before +after):\n%s", diff)
	}
}

func TestUpThatFailsLeavesNothing(t *testing.T) {
	needRoot(t)
	topology := bareTopology()
	topology.Servers, topology.Services = 1, topology.Services[:1]
	before := readMachine(t, topology.Name)
	var progress []string
	for _, phase := range []string{"Building", "Writing", "Starting"} {
		ctx, cancel := context.WithCancelCause(t.Context())
		_, err := Up(ctx, topology, Options{Progress: func(text string) {
			progress = append(progress, text)
			if strings.HasPrefix(text, phase) {
				cancel(errors.New("interrupted by the test"))
			}
		}})
		if err == nil || !strings.Contains(err.Error(), "interrupted by the test") {
			t.Errorf("Up interrupted while %s: %v", phase, err)
		}
		cancel(nil)
		if diff := cmp.Diff(before, readMachine(t, topology.Name)); diff != "" {
			t.Errorf("machine after an interruption while %s (-before +after):\n%s", phase, diff)
		}
	}
	for _, text := range []string{
		"Building the network: client, edge router, 2 balancers, 1 server, 1 service.",
		"Starting 1 process.",
	} {
		if !slices.Contains(progress, text) {
			t.Errorf("%q was not said, but %q", text, progress)
		}
	}
	topology.Bare = false // the test binary is not a balancer
	if _, err := Up(t.Context(), topology, Options{Segue: os.Args[0]}); err == nil || !strings.Contains(err.Error(), "start s1 agent: the process ended") {
		t.Errorf("Up with daemons that fail: %v", err)
	}
	if diff := cmp.Diff(before, readMachine(t, topology.Name)); diff != "" {
		t.Errorf("machine after a failure (-before +after):\n%s", diff)
	}
}

func TestDownAfterUpWasKilled(t *testing.T) {
	needRoot(t)
	name := bareTopology().Name + "k"
	before := readMachine(t, name)
	for _, phase := range []string{"Building", "Writing", "Starting"} {
		cmd := exec.Command(os.Args[0], "lab", "up", name)
		out, err := cmd.StdoutPipe()
		testhost.Must(t, err)
		testhost.Must(t, cmd.Start())
		for lines := bufio.NewScanner(out); lines.Scan() && !strings.HasPrefix(lines.Text(), phase); {
		}
		cmd.Process.Kill()
		cmd.Wait()
		if err := Down(name); err != nil {
			t.Errorf("down after kill while %s: %v", phase, err)
		}
		if diff := cmp.Diff(before, readMachine(t, name)); diff != "" {
			t.Errorf("machine after a kill while %s (-before +after):\n%s", phase, diff)
		}
	}
}

func TestOpenOfALabThatIsNotUp(t *testing.T) {
	_, err := Open("nosuchlab", Options{})
	if !errors.Is(err, ErrNotUp) || !strings.HasPrefix(err.Error(), `lab "nosuchlab" is not up`) {
		t.Errorf("Open: %v", err)
	}
}

// TestAddressesAreOfUseAtOnce requires that no address is tentative. A server that passes on a
// client's packet resolves the next server's link address from its own link-local address. While
// that is tentative, for up to two seconds, the server drops the packets. Clients repeat SYNs after
// one second.
func TestAddressesAreOfUseAtOnce(t *testing.T) {
	l := up(t, bareTopology())
	for _, n := range l.Nodes {
		err := n.netlink(func(h *netlink.Handle) error {
			addresses, err := h.AddrList(nil, netlink.FAMILY_V6)
			for _, a := range addresses {
				if a.Flags&unix.IFA_F_TENTATIVE != 0 {
					t.Errorf("%s: %s is tentative", n.Name, a.IPNet)
				}
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestECMP counts connections from the client at listeners on the balancers themselves.
func TestECMP(t *testing.T) {
	l := up(t, bareTopology())
	// Without flow labels, only the ports distinguish connections. With them, each connection would
	// have its own label, and change it when it retransmits.
	err := l.Node("client").Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/auto_flowlabels", []byte("0"), 0)
	})
	testhost.Must(t, err)
	for _, vip := range l.Topology.vips() {
		served := make(chan string)
		for _, name := range l.balancers() {
			assignVIP(t, l.Node(name), vip)
			listener, err := l.Node(name).Listen(t.Context(), "tcp", netip.AddrPortFrom(vip, 80).String())
			testhost.Must(t, err)
			defer listener.Close()
			go func() {
				for {
					conn, err := listener.Accept()
					if err != nil {
						return
					}
					conn.Close()
					served <- name
				}
			}()
		}
		count := func(connections int, nextHops ...string) map[string]int {
			testhost.Must(t, l.SetNextHops(nextHops...))
			counts := make(map[string]int)
			for range connections {
				conn, err := l.Node("client").Dial(t.Context(), "tcp", netip.AddrPortFrom(vip, 80).String())
				testhost.Must(t, err)
				counts[await(t, "a balancer to accept", served)]++
				conn.Close()
			}
			return counts
		}
		// The probability that a given balancer gets no connection is 2^-64.
		if got := count(64, "lb1", "lb2"); len(got) != 2 {
			t.Errorf("%s over both: %v", vip, got)
		}
		if diff := cmp.Diff(map[string]int{"lb2": 16}, count(16, "lb2")); diff != "" {
			t.Errorf("%s over lb2 alone (-want +got):\n%s", vip, diff)
		}
	}
	testhost.Must(t, l.SetNextHops())
	vip := l.Topology.vips()[0]
	_, err = l.Node("client").Dial(t.Context(), "tcp", netip.AddrPortFrom(vip, 80).String())
	if !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("dial without balancers: %v", err)
	}
	if err := l.SetNextHops("s1"); err == nil {
		t.Error("a server is taken for a balancer")
	}
}

// assignVIP gives a node the VIP as an address of its own.
func assignVIP(t *testing.T, n *Node, vip netip.Addr) {
	t.Helper()
	err := n.netlink(func(h *netlink.Handle) error {
		return addInterface(h, "lo", netip.PrefixFrom(vip, vip.BitLen()))
	})
	if err == nil {
		err = n.awaitNetwork(t.Context())
	}
	testhost.Must(t, err)
}

// TestDemo runs the demo with balancers that send each packet unchanged to one server, by its MAC
// address. It shows that frames from XDP arrive unchanged.
func TestDemo(t *testing.T) {
	l := up(t, bareTopology())
	for i, name := range []string{"s1", "s2"} {
		for _, vip := range l.Topology.vips() {
			assignVIP(t, l.Node(name), vip)
		}
		forwardTo(t, l.Node(l.balancers()[i]), l.Node(name))
	}
	show := func(r *DemoResult) string {
		var out bytes.Buffer
		r.Write(&out)
		t.Log(out.String())
		return out.String()
	}
	result, err := l.Demo(t.Context())
	testhost.Must(t, err)
	show(result)
	if err := result.Err(); err != nil {
		t.Error(err)
	}
	t.Log(result.Summary())
	// Without its application, s1 still gets connections. The demo must detect that.
	testhost.Must(t, l.Process("s1", "nginx").Stop())
	result, err = l.Demo(t.Context())
	testhost.Must(t, err)
	if out := show(result); result.Err() == nil || !strings.Contains(out, "connection refused") {
		t.Errorf("demo without an nginx: %v\n%s", result.Err(), out)
	}
	if err := l.Process("s1", "nginx").Start(t.Context()); err != nil {
		t.Error(err)
	}
}

// forwardTo attaches an XDP program to a balancer. The program sends every packet for a VIP of the
// default topology back out, to the server's MAC address.
func forwardTo(t *testing.T, balancer, server *Node) {
	t.Helper()
	mac := func(n *Node) (mac net.HardwareAddr) {
		err := n.Do(func() error {
			ifi, err := net.InterfaceByName(uplink)
			if err == nil {
				mac = ifi.HardwareAddr
			}
			return err
		})
		testhost.Must(t, err)
		return mac
	}
	native := binary.NativeEndian
	vip6 := netip.MustParseAddr("2001:db8:80::").As16()
	vip4 := netip.MustParseAddr("203.0.113.0").As4()
	macs := append(bytes.Clone(mac(server)), mac(balancer)...)
	program := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word),
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word),
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 14+40), // Ethernet and IPv6; IPv4 with TCP or the echo's UDP is as long
		asm.JGT.Reg(asm.R4, asm.R3, "pass"),
		asm.LoadMem(asm.R4, asm.R2, 14+24, asm.DWord), // the first half of the IPv6 destination
		asm.LoadImm(asm.R5, int64(native.Uint64(vip6[:8])), asm.DWord),
		asm.JEq.Reg(asm.R4, asm.R5, "send"),
		asm.LoadMem(asm.R4, asm.R2, 14+16, asm.Word), // the IPv4 destination
		asm.HostTo(asm.BE, asm.R4, asm.Word),
		asm.And.Imm(asm.R4, -256), // its /24
		asm.LoadImm(asm.R5, int64(binary.BigEndian.Uint32(vip4[:])), asm.DWord),
		asm.LSh.Imm(asm.R4, 32), // clear the upper half
		asm.RSh.Imm(asm.R4, 32),
		asm.JNE.Reg(asm.R4, asm.R5, "pass"),
		asm.LoadImm(asm.R4, int64(native.Uint64(macs)), asm.DWord).WithSymbol("send"),
		asm.StoreMem(asm.R2, 0, asm.R4, asm.DWord),
		asm.LoadImm(asm.R4, int64(native.Uint32(macs[8:])), asm.DWord),
		asm.StoreMem(asm.R2, 8, asm.R4, asm.Word),
		asm.Mov.Imm(asm.R0, 3), // XDP_TX
		asm.Return(),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"), // XDP_PASS
		asm.Return(),
	}
	err := balancer.Do(func() error {
		prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, Instructions: program, License: "GPL"})
		if err != nil {
			return err
		}
		defer prog.Close()
		link, err := netlink.LinkByName(uplink)
		if err != nil {
			return err
		}
		return netlink.LinkSetXdpFdWithFlags(link, prog.FD(), nl.XDP_FLAGS_DRV_MODE)
	})
	testhost.Must(t, err)
}

func TestCapture(t *testing.T) {
	l := up(t, bareTopology())
	var file bytes.Buffer
	capture, err := l.Node("fabric").Capture("s1", &file)
	testhost.Must(t, err)
	sent := strings.Repeat("x", 100)
	exchange(t, l.Node("client"), netip.AddrPortFrom(l.Node("s1").IPv6, 9000), sent)
	if err := capture.Stop(); err != nil {
		t.Error(err)
	}
	const headers = 14 + 40 + 8 // Ethernet, IPv6, UDP
	want := []int{headers + len(sent), headers + len("s1\n") + len(sent)}
	if diff := cmp.Diff(want, udpLengths(t, &file)); diff != "" {
		t.Errorf("lengths of the captured datagrams (-want +got):\n%s", diff)
	}
	if _, err := l.Node("fabric").Capture("nosuch0", &file); err == nil || !strings.Contains(err.Error(), "fabric: capture on nosuch0") {
		t.Errorf("capture on an interface that does not exist: %v", err)
	}
}

// udpLengths returns the lengths of the UDP packets over IPv6 in a pcap file, in bytes.
func udpLengths(t *testing.T, file io.Reader) (lengths []int) {
	t.Helper()
	if _, err := io.CopyN(io.Discard, file, 24); err != nil {
		t.Fatal(err)
	}
	for {
		var header [16]byte
		if _, err := io.ReadFull(file, header[:]); err == io.EOF {
			return lengths
		} else if err != nil {
			t.Fatal(err)
		}
		packet := make([]byte, binary.NativeEndian.Uint32(header[8:]))
		if _, err := io.ReadFull(file, packet); err != nil {
			t.Fatal(err)
		}
		const protocol = 14 + 6 // the next header, behind the Ethernet header
		isIPv6 := len(packet) > protocol && binary.BigEndian.Uint16(packet[12:]) == unix.ETH_P_IPV6
		if isIPv6 && packet[protocol] == unix.IPPROTO_UDP {
			lengths = append(lengths, len(packet))
		}
	}
}

func TestProcessesAndStatus(t *testing.T) {
	topology := bareTopology()
	l := up(t, topology)
	other, err := Open(topology.Name, Options{})
	testhost.Must(t, err)
	// other stands for another command, which restarts processes that it has not started.
	restart := func(kill bool, node string, names ...string) {
		t.Helper()
		before := processIDs(other)
		processes, err := other.Restart(t.Context(), node, names, kill)
		testhost.Must(t, err)
		var restarted []string
		for _, p := range processes {
			restarted = append(restarted, p.String())
			requireSessionEnded(t, p.node, before[p.String()])
		}
		var changed []string
		for process, pid := range processIDs(other) {
			if pid != before[process] {
				changed = append(changed, process)
			}
		}
		slices.Sort(restarted)
		slices.Sort(changed)
		if len(restarted) == 0 || !slices.Equal(restarted, changed) {
			t.Errorf("restart of %s %v: restarted %q, other PIDs have %q", node, names,
				restarted, changed)
		}
	}
	ends := func() int {
		text, err := os.ReadFile(l.Process("s1", "echo").LogPath())
		testhost.Must(t, err)
		return strings.Count(string(text), "asked to end")
	}
	restart(false, "s1")
	if n := ends(); n != 1 {
		t.Errorf("the echo was asked to end %d times by a restart, want once", n)
	}
	restart(true, "s1", "echo")
	restart(true, "s2") // ends the workers of its nginx, too, which hold the ports
	if n := ends(); n != 1 {
		t.Errorf("the echo was asked to end %d times by a restart and a kill, want once", n)
	}
	// A process that somebody else has killed is started.
	killed := processIDs(other)["s2 nginx"]
	testhost.Must(t, unix.Kill(killed, unix.SIGKILL))
	restart(false, "s2", "nginx", "nginx")
	requireSessionEnded(t, l.Node("s2"), killed)
	for _, test := range []struct{ node, process, err string }{
		{"s3", "", `has no node "s3"; its nodes are fabric, edge, client, lb1, lb2, s1, s2`},
		{"edge", "", "has no processes to restart; these nodes have some: s1, s2"},
		{"s1", "lb", `has no process "lb"; its processes are nginx, echo`},
	} {
		names := strings.Fields(test.process)
		_, err := other.Restart(t.Context(), test.node, names, false)
		if err == nil || !strings.Contains(err.Error(), test.err) {
			t.Errorf("restart of %s %v: %v, want %s", test.node, names, err, test.err)
		}
	}
	if got, err := other.Status(); err != nil || got.Running != 4 || got.Processes != 4 {
		t.Errorf("%d of %d processes run, want 4 of 4; %v", got.Running, got.Processes, err)
	}
	echo := l.Process("s1", "echo")
	if err := echo.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "already runs") {
		t.Errorf("second start: %v", err)
	}
	// Kill the echo by way of other, which has not started it. `segue-lab lab down` does the same.
	testhost.Must(t, other.Process("s1", "echo").Kill())
	status, err := other.Status()
	testhost.Must(t, err)
	var text bytes.Buffer
	if err := status.Write(&text); err != nil || !strings.Contains(text.String(), "echo (NOT RUNNING") {
		t.Errorf("status does not tell that the echo is gone: %v\n%s", err, text.String())
	}
	testhost.Must(t, echo.Start(t.Context()))
	for _, n := range []*Node{l.Node("s1"), l.Node("s2")} {
		for _, addr := range []netip.Addr{n.IPv4, n.IPv6, host(n.Locator, 1)} {
			answer := exchange(t, l.Node("client"), netip.AddrPortFrom(addr, 9000), "hello")
			if want := n.Name + "\nhello"; answer != want {
				t.Errorf("%s answers %q, want %q", addr, answer, want)
			}
		}
	}
}

// requireSessionEnded fails the test if a node still has a process of the session.
func requireSessionEnded(t *testing.T, n *Node, session int) {
	t.Helper()
	pids, err := processesIn(n.namespacePath())
	testhost.Must(t, err)
	for _, pid := range pids {
		if session != 0 && sessionOf(pid) == session {
			t.Errorf("%s: process %d has outlived %d, which started it", n.Name, pid, session)
		}
	}
}

// processIDs returns the PIDs of the lab's running processes.
func processIDs(l *Lab) map[string]int {
	pids := make(map[string]int)
	for _, p := range l.Processes {
		if pid, alive := p.PID(); alive {
			pids[p.String()] = pid
		}
	}
	return pids
}

// exchange sends a datagram and returns the answer. The answer must come from the address that the
// datagram was sent to.
func exchange(t *testing.T, n *Node, to netip.AddrPort, text string) string {
	t.Helper()
	conn, err := n.Dial(t.Context(), "udp", to.String())
	testhost.Must(t, err)
	defer conn.Close()
	stop := context.AfterFunc(t.Context(), func() { conn.Close() })
	defer stop()
	if _, err := conn.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1500)
	got, err := conn.Read(buf)
	testhost.Must(t, err)
	return string(buf[:got])
}
