// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/lab"
)

// newLab returns the command that has the commands about labs.
func newLab() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Run a data centre in network namespaces of this machine",
		// Closing the terminal interrupts the building of a lab, as Ctrl-C does.
		PersistentPreRun: func(cmd *cobra.Command, _ []string) {
			ctx, _ := signal.NotifyContext(cmd.Context(), syscall.SIGHUP)
			cmd.SetContext(ctx)
		},
	}
	cmd.AddCommand(newLabUp(), newLabCheck(), newLabList(), newLabStatus(), newLabExec(),
		newLabRestart(), newLabImpair(), newLabQueries(), newLabDown(), newLabDemo(), newLabRun(),
		newLabReport(), newLabTable(),
		newLabUDPEcho(), newLabDelay(), newLabGuard())
	return cmd
}

// labOptions returns options with which the lab's progress goes to the command's output.
func labOptions(cmd *cobra.Command) lab.Options {
	return lab.Options{Progress: func(text string) { fmt.Fprintln(cmd.OutOrStdout(), text) }}
}

// labName adds the flag --name, for a lab that is up, to a command.
func labName(cmd *cobra.Command) *string {
	return cmd.Flags().String("name", defaultLab(), "`name` of the lab")
}

// defaultLab returns the name of the lab of the built-in topology. It parses the topology only
// once, because that takes longer than the rest of the start of segue-lab.
var defaultLab = sync.OnceValue(func() string { return lab.DefaultTopology().Name })

// labTopology adds the flags --file and --name, for a lab that is to be built. It returns a
// function that reads the topology.
func labTopology(cmd *cobra.Command) func() (lab.Topology, error) {
	cmd.Args = cli.NoArguments("the topology file", "-f")
	file := topologyFlag(cmd)
	name := cmd.Flags().String("name", "", "`name` of the lab (default: the topology's)")
	return func() (lab.Topology, error) {
		t, err := readTopology(cmd.InOrStdin(), *file)
		if *name != "" {
			t.Name = *name
		}
		return t, err
	}
}

// topologyFlag adds the flag --file to a command.
func topologyFlag(cmd *cobra.Command) *string {
	var file string
	cmd.Flags().VarP(&cli.FileFlag{Name: &file}, "file", "f",
		"topology `file`, or - for standard input (default: the built-in topology)")
	return &file
}

// readTopology returns the topology in a file. If file is "-", it reads the topology from in, and
// file names in the topology are relative to the working directory. If file is empty, it returns
// the built-in topology.
func readTopology(in io.Reader, file string) (lab.Topology, error) {
	switch file {
	case "":
		return lab.DefaultTopology(), nil
	case cli.StandardInput:
		text, name, err := cli.ReadInput(in, file)
		if err != nil {
			return lab.Topology{}, err
		}
		dir, err := os.Getwd()
		if err != nil {
			return lab.Topology{}, err
		}
		t, err := lab.ParseTopologyIn(text, dir)
		if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
			err = problems.In(name)
		}
		return t, err
	}
	return lab.LoadTopology(file)
}

func newLabUp() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Build a lab and leave it running",
	}
	topology := labTopology(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		t, err := topology()
		if err != nil {
			return err
		}
		if _, err := lab.Up(cmd.Context(), t, labOptions(cmd)); err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "The lab is up. Next:\n  %[2]s lab status%[1]s\n"+
			"  %[2]s lab exec%[1]s client -- curl -s URL\n  %[2]s lab down%[1]s\n",
			nameOption(t), cli.Program(programName))
		return nil
	}
	return cmd
}

func newLabCheck() *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE",
		Short: "Validate the topology of a lab",
		Long: `Check reads the topology of a lab from a file, or from standard input if the file is -. It
prints one line for each error, in the form FILE:LINE: FIELD "VALUE": ERROR.`,
		Args: cli.Arguments("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := args[0]
			if name == cli.StandardInput {
				name = "standard input"
			}
			t, err := readTopology(cmd.InOrStdin(), args[0])
			if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
				fmt.Fprintln(cmd.OutOrStdout(), problems)
				return fmt.Errorf("%s: invalid topology: %s", name, wording.Count(len(problems), "error"))
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: valid topology: %s, %s, %s\n", name,
				wording.Count(t.Balancers, "balancer"), wording.Count(t.Servers, "server"),
				wording.Count(len(t.Services), "service"))
			return nil
		},
	}
}

func newLabList() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the labs that are up",
		Long: `List prints the names of the labs that are up, one in each line. --json prints an object
with the key labs, an array of names.`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := lab.List()
			if err != nil {
				return err
			}
			if asJSON {
				labs := append([]string{}, names...) // in JSON an empty array, not null
				return cli.PrintJSON(cmd.OutOrStdout(), map[string][]string{"labs": labs})
			}
			if len(names) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "no labs are up")
			}
			for _, name := range names {
				fmt.Fprintln(cmd.OutOrStdout(), name)
			}
			return nil
		},
	}
	cli.JSONFlag(cmd, &asJSON)
	return cmd
}

func newLabStatus() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show a lab's nodes, processes and services",
		Args:  cli.NoArguments("the lab", "--name"),
	}
	name := labName(cmd)
	var asJSON bool
	cli.JSONFlag(cmd, &asJSON)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		l, err := lab.Open(*name, labOptions(cmd))
		if err != nil {
			return err
		}
		status, err := l.Status()
		if err != nil {
			return err
		}
		if asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), status)
		}
		return status.Write(cmd.OutOrStdout())
	}
	return cmd
}

// newLabExec returns the command that runs a command in a node's network namespace. Without a
// command it runs the user's shell. The command or shell replaces the process of segue-lab.
func newLabExec() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec NODE [-- COMMAND [ARGUMENT...]]",
		Short: "Run a command, or a shell, in a node's network namespace",
		Args:  cli.Arguments("NODE", "[COMMAND...]"),
	}
	name := labName(cmd)
	cmd.Flags().SetInterspersed(false) // flags after the node belong to the command that exec runs
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		command := args[1:]
		switch {
		case len(command) > 0 && command[0] == "--": // an argument: no flags are parsed after the node
			command = command[1:]
		case len(command) > 0 && strings.HasPrefix(command[0], "-"):
			return fmt.Errorf("lab exec: %s after the node: flags go before the node, "+
				"and the command goes after it", command[0])
		}
		l, err := lab.Open(*name, labOptions(cmd))
		if err != nil {
			return err
		}
		node, err := l.FindNode(args[0])
		if err != nil {
			return err
		}
		if len(command) == 0 {
			command = []string{"/bin/sh"}
			if shell := os.Getenv("SHELL"); shell != "" {
				command[0] = shell
			}
		}
		return node.Exec(command)
	}
	return cmd
}

func newLabRestart() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "restart NODE [PROCESS...]",
		Short: "Restart the processes of a node",
		Long: `Restart ends processes of a node of the lab and starts them again. Without PROCESS it
restarts all of them. It ends them by SIGTERM or, with --kill, by SIGKILL. It also starts
a process that does not run. The command returns when all processes are ready.

A balancer has the process lb, and bfd if the topology has edge.bfd. A software switch
has bmv2. The edge router has frr or bird if the topology has edge.router. A server has
agent, echo, and its application: nginx, apache, emulated or mediawiki. With mediawiki it
also has mariadb and memcached.

Balancers and agents run the file segue in the directory of segue-lab. It may be another
build than the one that they ran before.`,
		Example: "  segue-lab lab restart s1 agent\n  segue-lab lab restart --kill lb1",
		Args:    cli.Arguments("NODE", "[PROCESS...]"),
	}
	name := labName(cmd)
	kill := cmd.Flags().Bool("kill", false, "end the processes by SIGKILL, as in a crash")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		l, err := lab.Open(*name, labOptions(cmd))
		if err != nil {
			return err
		}
		processes, err := l.Restart(cmd.Context(), args[0], args[1:], *kill)
		if err != nil {
			return err
		}
		var running []string
		for _, p := range processes {
			pid, _ := p.PID()
			running = append(running, fmt.Sprintf("%s (%d)", p.Name, pid))
		}
		fmt.Fprintf(cmd.OutOrStdout(), "Lab %s: restarted on %s: %s.\n", *name, args[0],
			strings.Join(running, ", "))
		return nil
	}
	return cmd
}

// newLabImpair returns the command that replaces or ends the impairment of a lab. With --off, all
// shares are 0%, which ends it.
func newLabImpair() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "impair [NODE...]",
		Short: "Drop, duplicate or reorder packets between a lab's nodes",
		Long: `Impair drops, duplicates or reorders a share of the packets between the edge router,
balancers and servers. If nodes are named, it impairs only the packets to and from these
nodes. A new impairment replaces the earlier one. --off ends it.`,
		Example: "  segue-lab lab impair --drop 5% --reorder 5%\n" +
			"  segue-lab lab impair --drop 20% s1\n" +
			"  segue-lab lab impair --off",
		Args: cli.Arguments("[NODE...]"),
	}
	name := labName(cmd)
	var impairment lab.Impairment
	cmd.Flags().Var(&impairment.Drop, "drop", "`share` of the packets to drop, such as 5%")
	cmd.Flags().Var(&impairment.Duplicate, "duplicate", "`share` of the packets to send twice")
	cmd.Flags().Var(&impairment.Reorder, "reorder",
		"`share` of the packets to delay, so that later packets overtake them")
	cmd.Flags().Uint64Var(&impairment.Seed, "seed", 0, "`number` that seeds the random decisions")
	off := cmd.Flags().Bool("off", false, "end the impairment of all nodes")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		impairment.Links = args
		if err := checkImpair(cmd, impairment, *off); err != nil {
			return err
		}
		l, err := lab.Open(*name, labOptions(cmd))
		if err != nil {
			return err
		}
		for _, node := range args {
			if _, err := l.FindNode(node); err != nil {
				return err
			}
		}
		if err := l.Impair(cmd.Context(), impairment); err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "Lab %s: %s.\n", *name, impairment)
		return nil
	}
	return cmd
}

// checkImpair returns an error if --off is given together with shares, a seed or nodes. Without
// --off, it returns an error if no share is above 0%.
func checkImpair(cmd *cobra.Command, impairment lab.Impairment, off bool) error {
	given := func(flags ...string) bool { return slices.ContainsFunc(flags, cmd.Flags().Changed) }
	switch {
	case off && (given("drop", "duplicate", "reorder", "seed") || len(impairment.Links) > 0):
		return errors.New("lab impair: --off ends the impairment of all nodes; " +
			"it cannot have shares or nodes beside it")
	case off || impairment.Some():
		return nil
	case given("drop", "duplicate", "reorder"):
		return errors.New("lab impair: all shares are 0%: --off ends the impairment")
	}
	return errors.New("lab impair: missing a share: --drop, --duplicate or --reorder; " +
		"--off ends the impairment")
}

func newLabDown() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove a lab",
		Long: `Down ends all processes in the network namespaces of the lab, and removes the
namespaces, files and pinned tables of the lab. It does the same with balancers and agents
that were started by hand in the lab. It also removes a lab that is half built or half
removed.`,
		Args: cli.NoArguments("the lab", "--name"),
	}
	name := labName(cmd)
	ifExists := cmd.Flags().Bool("if-exists", false, "succeed if the lab does not exist")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		err := lab.Down(*name)
		if *ifExists && errors.Is(err, lab.ErrNotUp) {
			fmt.Fprintf(cmd.OutOrStdout(), "There is no lab %s.\n", *name)
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "Lab %s is down.\n", *name)
		return nil
	}
	return cmd
}

// newLabDemo returns the command that builds a lab, sends requests, and removes the lab. Without
// --file it also compares placements, if no request has failed.
func newLabDemo() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Build a lab, send requests to every service, show the results, remove the lab",
		Long: `Demo builds a lab, sends requests to every service, shows the results, and removes the
lab. Without --file it then also compares placements: it sends the same requests to
servers with emulated processors by placement hash and by placement hunt.

--json prints an object with the keys requests, failed, bytes, services, servers, offers,
balancers, failures and placements. The progress then goes to standard error.`,
	}
	topology := labTopology(cmd)
	var asJSON bool
	cli.JSONFlag(cmd, &asJSON)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		t, err := topology()
		if err != nil {
			return err
		}
		if asJSON {
			return demonstrateAsJSON(cmd, t)
		}
		result, err := demonstrate(cmd.Context(), cmd.OutOrStdout(), t)
		if result != nil {
			result.Write(cmd.OutOrStdout())
			err = errors.Join(err, result.Err())
		}
		if err != nil {
			return err
		}
		if hasComparison(cmd) {
			if err := showPlacements(cmd); err != nil {
				return err
			}
		}
		fmt.Fprintln(cmd.OutOrStdout(), result.Summary())
		tellNext(cmd, t)
		return nil
	}
	return cmd
}

// hasComparison tells whether a demo also compares placements: it does so with the built-in
// topology.
func hasComparison(cmd *cobra.Command) bool { return !cmd.Flags().Changed("file") }

// demoAsJSON has what the demo prints with --json. Placements is empty if they were not compared.
type demoAsJSON struct {
	*lab.DemoResult
	Placements []experimentRow `json:"placements"`
}

// demonstrateAsJSON runs the demo of a topology, and prints the results as JSON. If requests have
// failed, it leaves out the comparison of placements. If the demo has no result, it prints nothing.
func demonstrateAsJSON(cmd *cobra.Command, t lab.Topology) error {
	result, err := demonstrate(cmd.Context(), cmd.ErrOrStderr(), t)
	if result == nil {
		return err
	}
	all := demoAsJSON{result, []experimentRow{}}
	err = errors.Join(err, result.Err())
	if err == nil && hasComparison(cmd) {
		_, all.Placements, err = comparePlacements(cmd.Context(), cmd.ErrOrStderr())
	}
	return errors.Join(err, cli.PrintJSON(cmd.OutOrStdout(), all))
}

// tellNext prints commands with which a user can go on after the demo of a topology.
func tellNext(cmd *cobra.Command, t lab.Topology) {
	up, name := "", nameOption(t) // options of lab up, and of the commands for the lab
	for _, flag := range []string{"file", "name"} {
		if cmd.Flags().Changed(flag) {
			up += fmt.Sprintf(" --%s %s", flag, cmd.Flag(flag).Value)
		}
	}
	fmt.Fprintf(cmd.OutOrStdout(), `
Next, build such a data centre, send a request, look at a balancer, and remove it:
    %[1]s lab up%[2]s
    %[1]s lab exec%[3]s client -- curl -s 'http://%[4]s/'
    %[6]s status -i %[5]s
    %[1]s lab down%[3]s
`, cli.Program(programName), up, name, t.Services[0].Address(), lab.Instance(t.Name, "lb1"),
		cli.Program("segue"))
}

// nameOption returns the option --name for the lab of a topology, with a blank before it. It
// returns an empty string if the lab has the default name, which commands use without the option.
func nameOption(t lab.Topology) string {
	if t.Name == defaultLab() {
		return ""
	}
	return " --name " + t.Name
}

// demonstrate builds a lab, sends requests to every service, and removes the lab. It prints its
// progress. If it fails before there is a result, the result is nil.
func demonstrate(ctx context.Context, progress io.Writer, t lab.Topology) (*lab.DemoResult, error) {
	options := lab.Options{Progress: func(text string) { fmt.Fprintln(progress, text) }}
	l, err := lab.Up(ctx, t, options)
	if err != nil {
		return nil, err
	}
	result, err := l.Demo(ctx)
	options.Progress("Removing the lab.")
	return result, errors.Join(err, l.Down())
}

// newLabUDPEcho returns the command that servers of the lab run for UDP services.
func newLabUDPEcho() *cobra.Command {
	return &cobra.Command{
		Use:    "udp-echo NAME PORT...",
		Short:  "Answer datagrams with a name and their content",
		Hidden: true,
		Args:   cli.Arguments("NAME", "PORT..."),
		RunE: func(cmd *cobra.Command, args []string) error {
			var ports []uint16
			for _, arg := range args[1:] {
				port, err := cli.ParsePort(arg)
				if err != nil {
					return err
				}
				ports = append(ports, port)
			}
			return lab.UDPEcho(cmd.Context(), args[0], ports)
		},
	}
}

// newLabDelay returns the command that the lab runs on its fabric while packets are reordered.
func newLabDelay() *cobra.Command {
	return &cobra.Command{
		Use:    "delay INTERFACE",
		Short:  "Make a TAP interface that sends frames back a while later",
		Hidden: true,
		Args:   cli.Arguments("INTERFACE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return lab.Delay(cmd.Context(), args[0])
		},
	}
}
