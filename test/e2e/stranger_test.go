package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/lab"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// TestStrangersForgeNoSignals has a host of the fabric that is no server of the services (s3 is none to s1) try to
// have a server signal in the stranger's stead: by a list in which the balancer comes after the server, and by
// an answer that the server's host is to forward. No balancer may get anything from that.
func TestStrangersForgeNoSignals(t *testing.T) {
	services := huntingServices(2)
	services[0].Accept = config.Accept{Policy: config.AcceptAlways}
	l := up(t, hunting(services...))
	requireWarned(t, l)
	signals := func() (returned counts) {
		returned = counts{}
		for _, name := range nodes(l, lab.RoleBalancer) {
			for reason, n := range packetCounts(t, l.Node(name)) {
				if strings.HasPrefix(reason, "return_") || strings.HasPrefix(reason, "drop_") {
					returned[name+" "+reason] = n
				}
			}
		}
		return returned
	}

	before := signals()
	lists := listsThroughServer(l, "s1", "lb1")
	send(t, l, "s3", "eth0", "s1", "eth0", lists)
	eventually(t, func() error {
		want := counts{"drop_next_segment": uint64(len(lists))}
		if diff := cmp.Diff(want, packetCounts(t, l.Node("s1")).with("drop_")); diff != "" {
			return errors.New("s1: -want +got:\n" + diff)
		}
		return nil
	})
	if grown := signals().since(t, before); len(grown) > 0 {
		t.Errorf("the balancers got packets that a stranger sent through s1: %v", grown)
	}

	c := dialServer(t, l, l.Topology.Services[0], "s1")
	must(t, l.Node("s1").Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	}))
	before = signals()
	client := netip.MustParseAddrPort(c.conn.LocalAddr().String())
	send(t, l, "s3", "eth0", "s1", "eth0", [][]byte{packet.TCP(c.service.Address(), client, packet.Flags(packet.RST))})
	eventually(t, func() error {
		if fields := strings.Fields(command(t, l, "s1", "nstat", "-asz", "Ip6OutForwDatagrams")); !slices.Contains(fields, "1") {
			return fmt.Errorf("s1 has not forwarded the packet: %v", fields)
		}
		return nil
	})
	if server, err := c.request(); server != "s1" || err != nil {
		t.Errorf("the connection goes to %q: %v", server, err)
	}
	if grown := signals().since(t, before); len(grown) > 0 {
		t.Errorf("the balancers got signals for a packet that s1 forwarded: %v", grown)
	}
}

// listsThroughServer are packets to a server of which a balancer comes next, and would get a signal: as the
// server's own, of every service and function.
func listsThroughServer(l *lab.Lab, server, balancer string) (frames [][]byte) {
	node := l.Node(server).Locator
	deliver := srv6.SID{Locator: node, Function: srv6.Deliver}.Addr()
	for _, s := range l.Topology.Services {
		client := netip.AddrPortFrom(l.Node("client").IPv6, 40000)
		if s.VIP.Is4() {
			client = netip.AddrPortFrom(l.Node("client").IPv4, 40000)
		}
		for _, f := range []srv6.Function{srv6.CreateStickiness, srv6.RemoveStickiness} {
			signal := srv6.SID{Locator: l.Node(balancer).Locator, Function: f}.Addr()
			flags := packet.Flags(packet.SYN | packet.ACK)
			if s.Encapsulation == config.SRv6Insert {
				srh := packet.NewSRH(2, deliver, signal, client.Addr())
				frames = append(frames, packet.TCP(s.Address(), client, flags, packet.Routing(srh)))
				continue
			}
			frame, err := packet.Encapsulate(packet.TCP(s.Address(), client, flags), packet.Encap{
				Kind: s.Encapsulation, Sender: node.Addr(), Segments: []netip.Addr{deliver, signal},
			})
			if err != nil {
				panic(fmt.Sprintf("encapsulate: %v", err))
			}
			frames = append(frames, frame)
		}
	}
	return frames
}

// dialServer opens connections to a service until one is at the server.
func dialServer(t *testing.T, l *lab.Lab, s lab.Service, server string) (c *connection) {
	t.Helper()
	eventually(t, func() (err error) {
		if c, err = dial(t.Context(), l, s); err != nil {
			return err
		}
		if c.server != server {
			c.conn.Close()
			return fmt.Errorf("%s got the connection", c.server)
		}
		return nil
	})
	t.Cleanup(func() { c.conn.Close() })
	return c
}

// requireWarned wants balancers that take signals from anybody, and agents that take anybody for a balancer, to have
// said so at their start, and to say so again at a reload.
func requireWarned(t *testing.T, l *lab.Lab) {
	t.Helper()
	warnings := func(node, process string) int {
		return strings.Count(readLog(t, l.Process(node, process)), "level=WARN msg=configuration warning=")
	}
	for node, process := range map[string]string{"lb1": "lb", "s1": "agent"} {
		if n := warnings(node, process); n != 1 {
			t.Errorf("%s has warned %d times at its start", node, n)
		}
		reload(t, l, node)
		if n := warnings(node, process); n != 2 {
			t.Errorf("%s has warned %d times, after a reload", node, n)
		}
	}
}
