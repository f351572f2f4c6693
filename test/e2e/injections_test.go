// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/lab"
)

// failure is a failure of a server.
type failure struct {
	name    string
	brief   bool                // the short test includes this failure
	prepare func(*failing)      // harmless steps before the failure
	inject  func(*failing)      // begins the failure
	heal    func(*failing)      // ends the failure
	tells   []inspect.Condition // conditions in status after a balancer has noticed
	hidden  []string            // services in which balancers may not notice
	// harmless says that no connection fails at all.
	harmless bool
	lasts    time.Duration // minimum time of observation for the tables
}

// failures are all injected failures.
var failures = []failure{
	{
		name: "link cut", brief: true, inject: cutLink, heal: mendLink,
		tells: unreachable, lasts: time.Minute,
	},
	{
		name: "neighbour lost", brief: true, inject: hideNeighbour, heal: showNeighbour,
		tells: unreachable, lasts: 30 * time.Second,
	},
	{
		name: "route withdrawn", brief: true, inject: withdrawRoute, heal: announceRoute,
		tells: []inspect.Condition{inspect.ServerUnresolved},
	},
	{
		name: "host stopped", inject: stopHost, heal: startHost,
		tells: unreachable, lasts: time.Minute,
	},
	{
		name: "application killed", brief: true, inject: killApplication, heal: startApplication,
		tells: []inspect.Condition{inspect.ServerFailing, inspect.ServerRefusing},
	},
	{
		name: "application resets", brief: true, inject: resetConnections, heal: restartApplication,
		tells: []inspect.Condition{inspect.ServerFailing, inspect.ServerRefusing},
	},
	{
		name: "application hangs", brief: true, inject: hangApplication, heal: resumeApplication,
		tells: []inspect.Condition{inspect.ServerFailing},
	},
	{
		name: "application slow", inject: slowApplication, heal: speedApplication,
		hidden: probed, harmless: true, lasts: 10 * time.Second,
	},
	{
		name: "server drained", brief: true, inject: drainServer, heal: undrainServer,
		tells: []inspect.Condition{inspect.ServerDrained}, harmless: true, lasts: 10 * time.Second,
	},
	{
		name: "agent killed", inject: killAgent, heal: startAgent,
		hidden: probed, harmless: true, lasts: 10 * time.Second,
	},
	{
		name: "agent detached", brief: true,
		prepare: stopAgent, inject: detachAgent, heal: startAgent,
		tells: []inspect.Condition{inspect.ServerFailing, inspect.ServerSilent, inspect.ServerUnheard},
	},
	{
		name: "VIP gone, agent puts it back", inject: removeVIPs,
		heal:  func(*failing) {}, // the agent itself repairs this
		tells: notServed, hidden: probed, lasts: 10 * time.Second,
	},
	{
		name: "VIP gone, agent does not assign VIPs", prepare: assignByHand,
		inject: removeVIPs, heal: assignByAgent, tells: notServed,
	},
	{
		name: "VIP gone, agent killed", prepare: killAgent, inject: removeVIPs, heal: startAgent,
		tells: []inspect.Condition{inspect.ServerFailing, inspect.ServerUnheard}, lasts: 30 * time.Second,
	},
}

// unreachable are the possible conditions of a server that gets no packets.
var unreachable = []inspect.Condition{
	inspect.ServerUnreachable, inspect.ServerFailing,
	inspect.ServerSilent, inspect.ServerUnheard,
}

// notServed are the possible conditions of a server without the VIPs, if its agent knows that they
// are missing.
var notServed = []inspect.Condition{
	inspect.ServerNotServed, inspect.ServerUnheard, inspect.ServerFailing,
}

// fabric is the servers' interface to the fabric.
const fabric = "eth0"

// cutLink sets the server's interface down.
func cutLink(f *failing) { f.run(f.server.Name, "ip", "link", "set", fabric, "down") }

// mendLink sets the interface up again, and restores the address and the routes that the kernel has
// removed.
func mendLink(f *failing) {
	f.run(f.server.Name, "ip", "link", "set", fabric, "up")
	address := netip.PrefixFrom(f.server.IPv6, 64).String()
	f.run(f.server.Name, "ip", "address", "replace", address, "dev", fabric, "nodad")
	for _, route := range f.routes {
		eventually(f.T, func() error { // when the link is ready
			args := append([]string{"route", "replace"}, route...)
			_, err := f.server.Run(f.Context(), "ip", args...)
			return err
		})
	}
}

// staticRoutes returns the server's routes with gateways, as arguments of `ip route`.
func (f *failing) staticRoutes() (routes [][]string) {
	for _, family := range []string{"-4", "-6"} {
		for line := range strings.Lines(f.run(f.server.Name, "ip", family, "route")) {
			if strings.Contains(line, " via ") {
				routes = append(routes, strings.Fields(line))
			}
		}
	}
	return routes
}

// hideNeighbour drops requests for the server's link address, by ARP and by IPv6 neighbour
// solicitations. It also removes the balancers' neighbour entries. All other packets still reach
// the server, and the kernel regards a neighbour as reachable while TCP makes progress, as in
// health checks (RFC 4861 section 7.3.1).
func hideNeighbour(f *failing) {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: dropsRequests,
	})
	must(f.T, err)
	defer program.Close()
	must(f.T, f.atPort(func(port netlink.Link) error {
		filter := requestFilter(port)
		filter.Fd = program.FD()
		return netlink.FilterAdd(filter)
	}))
	for _, name := range nodes(f.lab, lab.RoleBalancer) {
		for _, address := range []netip.Addr{f.server.IPv6, f.server.IPv4} {
			f.run(name, "ip", "neigh", "flush", "dev", fabric, "to", address.String())
		}
	}
}

func showNeighbour(f *failing) {
	must(f.T, f.atPort(func(port netlink.Link) error {
		return netlink.FilterDel(requestFilter(port))
	}))
}

// dropsRequests is a program at tc egress.
var dropsRequests = asm.Instructions{
	asm.Mov.Reg(asm.R6, asm.R1),
	asm.LoadAbs(12, asm.Half), // EtherType
	asm.JEq.Imm(asm.R0, unix.ETH_P_ARP, "arp"),
	asm.JNE.Imm(asm.R0, unix.ETH_P_IPV6, "pass"),
	asm.LoadAbs(14+6, asm.Byte), // next header
	asm.JNE.Imm(asm.R0, unix.IPPROTO_ICMPV6, "pass"),
	asm.LoadAbs(14+40, asm.Byte), // type
	asm.JEq.Imm(asm.R0, 135, "drop"),
	asm.Ja.Label("pass"),
	asm.LoadAbs(14+6, asm.Half).WithSymbol("arp"), // operation
	asm.JEq.Imm(asm.R0, 1, "drop"),
	asm.Mov.Imm(asm.R0, -1).WithSymbol("pass"), // TC_ACT_UNSPEC
	asm.Return(),
	asm.Mov.Imm(asm.R0, 2).WithSymbol("drop"), // TC_ACT_SHOT
	asm.Return(),
}

func requestFilter(port netlink.Link) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: port.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS,
			Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Name: "neighbour requests", DirectAction: true,
	}
}

// atPort calls do with the fabric's port to the server.
func (f *failing) atPort(do func(port netlink.Link) error) error {
	return f.lab.Node("fabric").Do(func() error {
		port, err := netlink.LinkByName(f.server.Name)
		if err != nil {
			return err
		}
		return do(port)
	})
}

// withdrawRoute removes the route to the server's locator from all other nodes, as a routing
// protocol would. Balancers still have a default route.
func withdrawRoute(f *failing) {
	for _, name := range f.others() {
		f.run(name, "ip", "-6", "route", "del", f.server.Locator.String())
	}
}

func announceRoute(f *failing) {
	for _, name := range f.others() {
		f.run(name, "ip", "-6", "route", "add",
			f.server.Locator.String(), "via", f.server.IPv6.String())
	}
}

// others returns the nodes that have a route to the server, balancers first.
func (f *failing) others() (names []string) {
	for _, role := range []lab.Role{lab.RoleBalancer, lab.RoleEdge, lab.RoleServer} {
		for _, name := range nodes(f.lab, role) {
			if name != f.server.Name {
				names = append(names, name)
			}
		}
	}
	return names
}

// stopHost disconnects the server from the fabric and kills its processes.
func stopHost(f *failing) {
	must(f.T, f.atPort(netlink.LinkSetDown))
	killApplication(f)
	killAgent(f)
}

func startHost(f *failing) {
	must(f.T, f.atPort(netlink.LinkSetUp))
	startApplication(f)
	startAgent(f)
}

// resetConnections replaces the application by one that accepts connections, and resets them.
func resetConnections(f *failing) {
	killApplication(f)
	must(f.T, f.server.Do(func() (err error) {
		f.resetter, err = net.Listen("tcp", ":80")
		return err
	}))
	go func(listener net.Listener) {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
		}
	}(f.resetter)
}

func restartApplication(f *failing) {
	must(f.T, f.resetter.Close())
	startApplication(f)
}

// signalApplication sends a signal to all processes of the application.
func (f *failing) signalApplication(signal unix.Signal) {
	pid, alive := f.process("nginx").PID()
	if !alive {
		f.Fatal("the application does not run")
	}
	must(f.T, unix.Kill(-pid, signal))
}

// hangApplication stops the application. The kernel still accepts connections for it.
func hangApplication(f *failing)   { f.signalApplication(unix.SIGSTOP) }
func resumeApplication(f *failing) { f.signalApplication(unix.SIGCONT) }

// slowApplication makes the application work in a fifth of the time. Answers take up to 0.4 s.
func slowApplication(f *failing) {
	ctx, cancel := context.WithCancel(f.Context())
	ended := make(chan struct{})
	pid, _ := f.process("nginx").PID()
	f.speedUp = func() { cancel(); <-ended }
	go func() {
		defer close(ended)
		defer unix.Kill(-pid, unix.SIGCONT)
		for ctx.Err() == nil {
			_ = unix.Kill(-pid, unix.SIGSTOP)
			wait(ctx, 400*time.Millisecond)
			_ = unix.Kill(-pid, unix.SIGCONT)
			wait(ctx, 100*time.Millisecond)
		}
	}()
}

func speedApplication(f *failing) { f.speedUp() }

// wait waits for a time, or until the context ends.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func drainServer(f *failing)   { f.onServer("drain") }
func undrainServer(f *failing) { f.onServer("undrain") }

// onServer runs a command about the server of each service on all balancers, at the same time.
func (f *failing) onServer(command string) {
	var group errgroup.Group
	for _, name := range nodes(f.lab, lab.RoleBalancer) {
		for _, s := range probed {
			group.Go(func() error {
				_, err := f.lab.Node(name).Run(f.Context(), segue, command, s+"/"+f.server.Name)
				return err
			})
		}
	}
	must(f.T, group.Wait())
}

// process returns one of the server's processes.
func (f *failing) process(name string) *lab.Process { return f.lab.Process(f.server.Name, name) }

func killApplication(f *failing)  { must(f.T, f.process("nginx").Kill()) }
func startApplication(f *failing) { must(f.T, f.process("nginx").Start(f.Context())) }

func stopAgent(f *failing)  { must(f.T, f.process("agent").Stop()) }
func killAgent(f *failing)  { must(f.T, f.process("agent").Kill()) }
func startAgent(f *failing) { must(f.T, f.process("agent").Start(f.Context())) }

func detachAgent(f *failing) { f.run(f.server.Name, segue, "agent", "detach", f.server.Instance()) }

// removeVIPs removes all VIPs from the server.
func removeVIPs(f *failing) { must(f.T, f.changeVIPs(netlink.AddrDel)) }

// assignByHand configures the agent not to assign the VIPs, and assigns them as an operator does.
func assignByHand(f *failing) {
	f.assignVIPs(false)
	must(f.T, f.changeVIPs(netlink.AddrAdd))
}

func assignByAgent(f *failing) { f.assignVIPs(true) }

// assignVIPs sets whether the agent assigns the VIPs.
func (f *failing) assignVIPs(assign bool) {
	cfg := f.server.AgentConfig()
	cfg.Node.AssignVIPs = &assign
	must(f.T, f.server.WriteAgentConfig(cfg))
	reload(f.T, f.lab, f.server.Name)
}

// changeVIPs adds all VIPs to the server's loopback interface, or removes them.
func (f *failing) changeVIPs(change func(netlink.Link, *netlink.Addr) error) error {
	return f.server.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, s := range f.lab.Topology.Services {
			bits := s.VIP.BitLen()
			prefix := &net.IPNet{IP: s.VIP.AsSlice(), Mask: net.CIDRMask(bits, bits)}
			address := &netlink.Addr{IPNet: prefix, Flags: unix.IFA_F_NODAD}
			err = errors.Join(err, change(lo, address))
		}
		return err
	})
}
