package balancer

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

// kernel is the data path: the program and the tables that it reads.
type kernel struct {
	instance string
	dir      string
	fresh    bool // nothing was pinned before
	objects  balancerObjects
	tables   *ebpf.MapSpec // of the inner maps
	flows    *flowTable
	clock    *flowClock
	servers  *serverTable
	services *serviceTable
	// nextServices describes tables of services.
	nextServices *ebpf.MapSpec
}

// openKernel loads the program and opens the tables that an earlier process left
// pinned, or makes them. Nothing is attached yet, and nothing changed in a table.
func openKernel(cfg *config.Balancer, log *slog.Logger) (*kernel, error) {
	_, err := os.Stat(datapath.Dir(cfg.Node.Instance))
	fresh := errors.Is(err, os.ErrNotExist)
	dir, err := datapath.MakeDir(cfg.Node.Instance)
	if err != nil {
		return nil, err
	}
	spec, err := loadBalancer()
	if err != nil {
		return nil, err
	}
	for _, m := range []string{
		balancerMapFlows, balancerMapIdentity, balancerMapPorts, balancerMapReasons,
		balancerMapServerCounters, balancerMapServerLabels, balancerMapServers,
		balancerMapServiceLabels, balancerMapServices, balancerMapTables,
	} {
		spec.Maps[m].Pinning = ebpf.PinByName
	}
	spec.Maps[balancerMapFlows].MaxEntries = flowBuckets(cfg.Node.Limits.Flows)
	spec.Maps[balancerMapServers].MaxEntries = serverSlots(cfg.Node.Limits.Servers)
	spec.Maps[balancerMapServerCounters].MaxEntries = serverSlots(cfg.Node.Limits.Servers)

	k := &kernel{
		instance: cfg.Node.Instance, dir: dir, fresh: fresh,
		tables: spec.Maps[balancerMapTables].InnerMap, nextServices: spec.Maps[balancerMapServices].InnerMap,
	}
	if err := k.load(spec, cfg.Node.Seed, log); err != nil {
		_ = k.objects.Close()
		return nil, errors.Join(k.explain(err), k.undo())
	}
	return k, nil
}

// serverSlots is how many slots that many servers need: as many again, so that
// all can be replaced at once, while the flows of those before are swept. A slot
// has 16 bits.
func serverSlots(servers uint32) uint32 {
	return min(2*servers, 1<<16)
}

func (k *kernel) load(spec *ebpf.CollectionSpec, seed uint64, log *slog.Logger) error {
	options := ebpf.MapOptions{PinPath: k.dir}
	if err := renewReasons(spec.Maps[balancerMapReasons], options, log); err != nil {
		return err
	}
	identity, err := readIdentity(spec.Maps[balancerMapIdentity], options, seed)
	if err != nil {
		return err
	}
	if k.clock, err = newFlowClock(); err != nil {
		return err
	}
	for name, value := range map[string]any{
		balancerVarFlowTickShift:     k.clock.shift,
		balancerVarFlowBucketKeys:    identity.FlowBucketKeys,
		balancerVarFlowSignatureKeys: identity.FlowSignatureKeys,
		balancerVarFlowBucketMask:    spec.Maps[balancerMapFlows].MaxEntries - 1,
		balancerVarServiceKeys:       identity.ServiceKeys,
		balancerVarBucketKeys:        identity.BucketKeys,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	if err := spec.LoadAndAssign(&k.objects, &ebpf.CollectionOptions{Maps: options}); err != nil {
		return err
	}
	k.clock.program = k.objects.FlowClock
	if err := k.objects.Identity.Put(uint32(0), identity); err != nil {
		return fmt.Errorf("write identity: %w", err)
	}
	if k.flows, err = mapFlows(k.objects.Flows, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if k.servers, err = mapServers(k.objects.Servers, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	k.services, err = openServices(k.objects.Services, identity, unix.PROT_READ|unix.PROT_WRITE)
	return err
}

// explain says what to do about pins that another build or other limits left.
func (k *kernel) explain(err error) error {
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf("the kernel refuses the program: %+v", verifier)
	}
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return fmt.Errorf("the tables in %s have another layout or other limits, and flows in them: "+
			"`segue lb detach %s` drops them: %w", k.dir, k.instance, err)
	}
	return fmt.Errorf("load the data path: %w", err)
}

// renewReasons takes the counters of a build that had more or fewer reasons away:
// they alone of all tables can be lost without harm.
func renewReasons(spec *ebpf.MapSpec, options ebpf.MapOptions, log *slog.Logger) error {
	m, err := ebpf.NewMapWithOptions(spec, options)
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		log.Warn("another build counted other reasons: their counters start at zero")
		return os.Remove(filepath.Join(options.PinPath, spec.Name))
	}
	if err != nil {
		return err
	}
	return m.Close()
}

// readIdentity returns the hash keys: those of the flow table that exists, or
// fresh ones.
func readIdentity(spec *ebpf.MapSpec, options ebpf.MapOptions, seed uint64) (*balancerIdentity, error) {
	m, err := ebpf.NewMapWithOptions(spec, options)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	var identity balancerIdentity
	if err := m.Lookup(uint32(0), &identity); err != nil {
		return nil, fmt.Errorf("read identity: %w", err)
	}
	if identity.FlowBucketKeys == (flowKeys{}) {
		for _, keys := range []*[7]uint64{
			&identity.FlowBucketKeys, &identity.FlowSignatureKeys, &identity.ServiceKeys,
		} {
			if err := binary.Read(rand.Reader, binary.NativeEndian, keys); err != nil {
				return nil, fmt.Errorf("make hash keys: %w", err)
			}
		}
	}
	identity.BucketKeys = bucketKeys(seed)
	return &identity, nil
}

// attach puts the program on an interface, in the place of an earlier build's.
func (k *kernel) attach(ifindex int) (datapath.Attached, error) {
	if err := datapath.PinProgram(k.objects.XdpLb, filepath.Join(k.dir, datapath.BalancerProgram)); err != nil {
		return datapath.Attached{}, err
	}
	return datapath.AttachXDP(k.objects.XdpLb, ifindex, filepath.Join(k.dir, datapath.LinkPin))
}

// undo takes away what a first start has pinned, and nobody has used.
func (k *kernel) undo() error {
	if !k.fresh {
		return nil
	}
	return datapath.RemoveDir(k.instance)
}

// close lets go of the data path; what is pinned works on.
func (k *kernel) close() error {
	return errors.Join(k.flows.close(), k.servers.close(), k.services.close(), k.objects.Close())
}

// setHostMAC tells the program which frames are for this host.
func (k *kernel) setHostMAC(mac [6]byte) error {
	if err := k.objects.HostMac.Set(macWord(mac)); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// macWord is a MAC address in memory order, in the low 48 bits.
func macWord(mac [6]byte) uint64 {
	var word [8]byte
	copy(word[:], mac[:])
	return binary.LittleEndian.Uint64(word[:])
}

// serverTable is the kernel's server table, mapped into this process, so that
// single words are replaced without a packet seeing half of one.
type serverTable struct {
	memory  []byte
	servers []balancerServer
}

func mapServers(m *ebpf.Map, protection int) (*serverTable, error) {
	size := int(m.MaxEntries()) * int(m.ValueSize())
	memory, err := unix.Mmap(m.FD(), 0, size, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the server table: %w", err)
	}
	first := (*balancerServer)(unsafe.Pointer(unsafe.SliceData(memory)))
	return &serverTable{memory, unsafe.Slice(first, m.MaxEntries())}, nil
}

func (t *serverTable) close() error {
	return unix.Munmap(t.memory)
}

// put fills a free slot. Its flags, which bring it to life, come last.
func (t *serverTable) put(slot, service uint32, address, source netip.Addr, flags balancerServerFlags) {
	server := &t.servers[slot]
	server.Service = service
	atomic.StoreUint64(&server.NextHop, 0)
	server.Address = in6(address)
	server.Source = in6(source)
	t.setFlags(slot, flags)
}

func (t *serverTable) flags(slot uint32) balancerServerFlags {
	return balancerServerFlags(atomic.LoadUint32(&t.servers[slot].Flags))
}

func (t *serverTable) setFlags(slot uint32, flags balancerServerFlags) {
	atomic.StoreUint32(&t.servers[slot].Flags, uint32(flags))
}

// setNextHop names the MAC address and port by which a server is reached.
func (t *serverTable) setNextHop(slot uint32, mac [6]byte, port uint16) {
	atomic.StoreUint64(&t.servers[slot].NextHop, macWord(mac)|uint64(port)<<48)
}

func (t *serverTable) hasNextHop(slot uint32) bool {
	return atomic.LoadUint64(&t.servers[slot].NextHop) != 0
}

func (t *serverTable) clearNextHop(slot uint32) {
	atomic.StoreUint64(&t.servers[slot].NextHop, 0)
}

// in6 is an address as the data path holds it: IPv4 in its IPv4-mapped form.
func in6(address netip.Addr) (out balancerIn6Addr) {
	out.In6U.U6Addr8 = address.As16()
	return out
}

// addrOf is the reverse of in6.
func addrOf(in balancerIn6Addr) netip.Addr {
	return netip.AddrFrom16(in.In6U.U6Addr8).Unmap()
}

// candidatesPerWord is CANDIDATES_PER_WORD in bpf/types.h.
const candidatesPerWord = 4

// install writes a candidate table under a number that no service names yet.
func (k *kernel) install(number uint32, rows []uint16) error {
	words := make([]uint64, max(1, (len(rows)+candidatesPerWord-1)/candidatesPerWord))
	keys := make([]uint32, len(words))
	for i := range keys {
		keys[i] = uint32(i)
	}
	packed := unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(words))), len(words)*candidatesPerWord)
	copy(packed, rows)
	spec := k.tables.Copy()
	spec.MaxEntries = uint32(len(words))
	table, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("make a table of %d candidates: %w", len(rows), err)
	}
	defer table.Close()
	if _, err := table.BatchUpdate(keys, words, nil); err != nil {
		return fmt.Errorf("fill a table of %d candidates: %w", len(rows), err)
	}
	if err := k.objects.Tables.Put(number, table); err != nil {
		return fmt.Errorf("install table %d: %w", number, err)
	}
	return nil
}

// Detach takes the data path of an instance out of the kernel, with all flows.
func Detach(instance string) error {
	return datapath.RemoveDir(instance)
}
