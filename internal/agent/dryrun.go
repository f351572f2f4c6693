// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// dryRun is a copy of an agent's XDP program that decides what happens to a packet, and changes
// nothing (bpf/net/dryrun.h). It shares the tables and the variables of the original.
type dryRun struct {
	program   *ebpf.Program
	record    *ebpf.Variable // the decision of the last run: agentDecision
	hostMAC   *ebpf.Variable
	locator   *ebpf.Variable
	balancers *ebpf.Map
}

// Sections of global variables that a dry run does not share with the original: the constant
// dry_run has another value there, and the decisions of a dry run are in a map of its own.
const (
	constantsSection = ".rodata"
	recordSection    = ".data.decision"
)

// errOtherBuild means that a dry run of this build would not decide as the running program does.
var errOtherBuild = errors.New("another build of segue loaded the agent's program: " +
	"restart the agent, or trace with that build")

// newDryRun loads a dry run of an agent's XDP program, which must be of this build. The dry run
// does not need the original afterwards.
func newDryRun(original *ebpf.Program) (_ *dryRun, err error) {
	spec, _, err := loadPermitted()
	if err != nil {
		return nil, err
	}
	maps, err := datapath.MapsOf(original, spec.Maps)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, datapath.CloseMaps(maps)) }()
	if err := setConstants(spec, maps[constantsSection]); err != nil {
		return nil, err
	}
	var objects struct {
		Program   *ebpf.Program  `ebpf:"xdp_agent"`
		Record    *ebpf.Variable `ebpf:"record"`
		HostMac   *ebpf.Variable `ebpf:"host_mac"`
		Locator   *ebpf.Variable `ebpf:"node_locator"`
		Balancers *ebpf.Map      `ebpf:"balancers"`
	}
	if err := datapath.LoadOn(spec, &objects, shared(maps)); errors.Is(err, ebpf.ErrMapIncompatible) {
		// A map of the original has another layout than in this build.
		return nil, fmt.Errorf("%w: %w", errOtherBuild, err)
	} else if err != nil {
		return nil, fmt.Errorf("load the dry run of %s: %w", agentProgXdpAgent, err)
	}
	d := &dryRun{objects.Program, objects.Record, objects.HostMac, objects.Locator, objects.Balancers}
	if err := d.checkSame(original); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// setConstants gives a specification the constants of a running program, and makes it a dry run.
func setConstants(spec *ebpf.CollectionSpec, constants *ebpf.Map) error {
	if constants == nil || constants.ValueSize() != spec.Maps[constantsSection].ValueSize {
		return errOtherBuild
	}
	values, err := constants.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read the program's constants: %w", err)
	}
	for _, v := range spec.Variables {
		if v.SectionName == constantsSection {
			v.Value = values[v.Offset:][:v.Size()]
		}
	}
	if err := spec.Variables[agentVarDryRun].Set(true); err != nil {
		return fmt.Errorf("make the program a dry run: %w", err)
	}
	return nil
}

// shared returns the maps that a dry run shares with the original.
func shared(maps map[string]*ebpf.Map) map[string]*ebpf.Map {
	all := map[string]*ebpf.Map{}
	for name, m := range maps {
		if name != constantsSection && name != recordSection {
			all[name] = m
		}
	}
	return all
}

// checkSame returns an error if the dry run and the original have different instructions.
func (d *dryRun) checkSame(original *ebpf.Program) error {
	own, err := d.program.Info()
	if err != nil {
		return fmt.Errorf("describe the dry run: %w", err)
	}
	info, err := original.Info()
	if err != nil {
		return fmt.Errorf("describe the agent's program: %w", err)
	}
	if own.Tag != info.Tag {
		return fmt.Errorf("%w: its instructions are %s, not %s", errOtherBuild, info.Tag, own.Tag)
	}
	return nil
}

func (d *dryRun) close() error { return errors.Join(d.program.Close(), d.balancers.Close()) }

// decide returns what the attached program would decide about a frame now. It looks for sockets in
// the network namespace of the calling thread.
func (d *dryRun) decide(frame []byte) (decision agentDecision, err error) {
	if err := d.record.Set(agentDecision{}); err != nil {
		return decision, fmt.Errorf("clear the record of the dry run: %w", err)
	}
	if _, err := d.program.Run(&ebpf.RunOptions{Data: frame}); err != nil {
		return decision, fmt.Errorf("dry run of %s: %w", agentProgXdpAgent, err)
	}
	if err := d.record.Get(&decision); err != nil {
		return decision, fmt.Errorf("read the record of the dry run: %w", err)
	}
	return decision, nil
}

// service returns the key of the service whose accept policy applies. If no policy applies, the
// protocol of the key is 0.
func (d *agentDecision) service() agentServiceKey {
	key := agentServiceKey{Port: d.Service.Port, Protocol: d.Service.Protocol}
	key.Vip.In6U.U6Addr8 = d.Service.Vip.In6U.U6Addr8
	return key
}

// question describes a packet of a connection, as a balancer could send it to the server.
type question struct {
	protocol    desired.Protocol // of UDP, the packet is an Initial of QUIC
	client, vip netip.AddrPort
	function    srv6.Function
	last        bool // no other server is left
}

// frame returns the packet that q describes. ok is false if the server has no locator, so that no
// balancer sends it packets with functions.
func (d *dryRun) frame(q question) (frame []byte, ok bool, err error) {
	var locator uint64
	var mac [8]byte
	if err := errors.Join(d.locator.Get(&locator), d.hostMAC.Get(&mac)); err != nil {
		return nil, false, fmt.Errorf("read the agent's variables: %w", err)
	}
	if locator == 0 {
		return nil, false, nil
	}
	sender, err := d.sender()
	if err != nil {
		return nil, false, err
	}
	// srv6-encap carries both IP versions. Decisions do not depend on the encapsulation.
	frame, err = packet.Encapsulate(q.inner(), packet.Encap{
		Kind: desired.SRv6Encap, Sender: sender, Segments: q.segments(locator),
		NextHop: packet.MAC(mac[:6]),
	})
	if err != nil {
		return nil, false, fmt.Errorf("make a packet from %s to %s: %w", q.client, q.vip, err)
	}
	return frame, true, nil
}

// inner returns the client's packet. A packet of UDP is an Initial of QUIC version 1, with the
// shortest ID that a client may choose, and without the fields behind the IDs.
func (q question) inner() []byte {
	if q.protocol == desired.UDP {
		return packet.UDP(q.client, q.vip, packet.Payload(packet.QUICHeader(true, make([]byte, 8))))
	}
	return packet.TCP(q.client, q.vip, packet.Flags(q.flags()))
}

// flags returns the TCP flags of the packet that q describes. A packet that is not a SYN has no
// ACK: the program would compare the acknowledged number with that of the server's SYN-ACK or SYN
// cookie, which is not known here.
func (q question) flags() packet.TCPFlags {
	if q.function == srv6.ConnectAvail || q.function == srv6.ConnectForce {
		return packet.SYN
	}
	return packet.PSH
}

// segments returns the server's SID, and then that of another server, unless this server is the
// last. The other server is invented: its locator differs in one bit of the last byte.
func (q question) segments(locator uint64) []netip.Addr {
	sid := srv6.SID{Locator: locatorPrefix(locator), Function: q.function}
	if q.last {
		return []netip.Addr{sid.Addr()}
	}
	other := srv6.SID{Locator: locatorPrefix(locator ^ 1<<63), Function: q.function}
	return []netip.Addr{sid.Addr(), other.Addr()}
}

// sender returns the locator of a balancer whose packets the agent accepts. If the agent accepts
// those of all balancers, sender returns the address ::.
func (d *dryRun) sender() (netip.Addr, error) {
	var prefix agentLocatorPrefix
	err := d.balancers.NextKey(nil, &prefix)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return netip.Addr{}, fmt.Errorf("read %s: %w", d.balancers, err)
	}
	var address [16]byte
	copy(address[:], prefix.Locator[:])
	return netip.AddrFrom16(address), nil
}

// locatorPrefix returns the prefix of a locator of the data path, which has its bytes in the order
// of memory.
func locatorPrefix(locator uint64) netip.Prefix {
	var address [16]byte
	binary.NativeEndian.PutUint64(address[:], locator)
	return netip.PrefixFrom(netip.AddrFrom16(address), srv6.LocatorBits)
}
