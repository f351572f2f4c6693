// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/wording"
)

// newCheck returns the command that validates configuration files. It changes nothing.
func newCheck() *cobra.Command {
	var o checkOptions
	cmd := &cobra.Command{
		Use:   "check FILE...",
		Short: "Validate configuration files, and check whether they fit together",
		Long: `Check reads a configuration file of a balancer or an agent. It prints one line
for each error, in the form FILE:LINE: FIELD "VALUE": ERROR. It prints warnings to
standard error. They begin with "warning: FILE:LINE:". A warning is about a valid
setting that is rarely intended. Check changes nothing on the machine. It can run
anywhere, as any user. FILE can also be given by -c. If FILE is -, check reads standard
input.

If there are several files, check also compares the files of balancers with those of
agents: VIPs, ports, protocols, encapsulations, locators, addresses, server IDs of QUIC
and node.balancers. If the files with the keys for signals are on this host, it also
compares the keys. An error names the lines of both files. It is an error if an agent's
host is not a server of the balancers. There is a warning for each server without an
agent's file.

With --against, check also compares the file with the configuration of the process that
runs the instance. It prints each changed field that needs a restart. It also prints each
override of the instance that would be invalid with the file. This needs root.

Without --role, check finds out by the fields of a file whether the file is a balancer's or
an agent's. It takes a mistyped field for the field that was probably meant. "segue-lab lab
check" validates the topology of a lab.

With --strict, check also prints findings to standard error. A finding is about a
setting that is legal but unwise. It tells the reason, the cure and the name of the rule.
Findings about permissions and interfaces are about the host on which the command runs. To
permit what a rule finds, give the name of the rule to --allow.

The exit code is 0 if the files are valid, with or without warnings. It is 1 if a
file is invalid, if the files do not fit together, or if the instance would refuse to
reload the file. With --strict it is 2 if the files are valid and fit together, but there
are warnings or findings.`,
		Example: `  segue check lb.yaml
  segue check lb.yaml s1-agent.yaml s2-agent.yaml
  segue check -c lb.yaml --strict --allow one-server,seed
  segue check -c /etc/segue/lb.yaml --against lb`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.config != "" {
				args = append([]string{o.config}, args...)
			}
			return check(cmd, args, o)
		},
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if o.config == "" && len(args) == 0 {
			return fmt.Errorf("%s: missing FILE", cli.CommandName(cmd))
		}
		return nil
	}
	cmd.Flags().VarP(&cli.FileFlag{Name: &o.config}, "config", "c", "configuration `file`")
	cmd.Flags().StringVar(&o.role, "role", "", "`role` of the file: lb or agent")
	cmd.Flags().StringVar(&o.against, "against", "",
		"`name` of a running instance to compare the file with")
	cmd.Flags().BoolVar(&o.strict, "strict", false, "also report settings that are legal but unwise")
	cmd.Flags().StringSliceVar(&o.allow, "allow", nil,
		"with --strict: `name`s of rules that the file may break, separated by commas")
	_ = cmd.RegisterFlagCompletionFunc("allow", cobra.FixedCompletions(config.Rules(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// checkOptions are the flags of the command.
type checkOptions struct {
	config, role, against string
	strict                bool
	allow                 []string
}

// validate returns an error if the flags exclude each other, or cannot be used with this number of
// files.
func (o *checkOptions) validate(files int) error {
	switch {
	case files > 1 && o.role != "":
		return errors.New("--role: only with one file; the content of several files tells their roles")
	case files > 1 && o.against != "":
		return errors.New("--against: only with one file")
	}
	if len(o.allow) > 0 && !o.strict {
		return errors.New("--allow: only with --strict")
	}
	for _, name := range o.allow {
		if !slices.Contains(config.Rules(), name) {
			return fmt.Errorf("--allow %q: no such rule; the rules are %s", name, strings.Join(config.Rules(), ", "))
		}
	}
	return nil
}

// checkRun is one run of the command.
type checkRun struct {
	cmd *cobra.Command
	checkOptions
	sides []*config.Side // the input of compare: one item for each valid file so far
}

// check checks each file alone, and then whether the valid files fit together.
func check(cmd *cobra.Command, files []string, o checkOptions) error {
	if err := o.validate(len(files)); err != nil {
		return err
	}
	run := checkRun{cmd: cmd, checkOptions: o}
	var errs []error
	for i, file := range files {
		if slices.Contains(files[:i], file) {
			return fmt.Errorf("%s: given twice", file)
		}
		if err := run.file(file); err != nil {
			errs = append(errs, err)
		}
	}
	if len(files) > 1 {
		errs = append(errs, run.compare())
	}
	return joinErrors(errs)
}

// joinErrors joins the errors of several files. If each error has the exit code exitUnwise, the
// result has this code. Otherwise its exit code is 1.
func joinErrors(errs []error) error {
	err := errors.Join(errs...)
	if err == nil {
		return nil
	}
	for _, one := range errs {
		if one != nil && cli.ExitCode(one) != exitUnwise {
			return cli.WithCode(err, 1)
		}
	}
	return cli.WithCode(err, exitUnwise)
}

// compare compares the valid files of balancers with those of agents, and prints errors and
// warnings.
func (c *checkRun) compare() error {
	problems, warnings := config.CompareSides(c.sides)
	printFileWarnings(c.cmd.ErrOrStderr(), warnings)
	if len(problems) > 0 {
		fmt.Fprintln(c.cmd.OutOrStdout(), problems)
		return fmt.Errorf("the files do not fit together: %s", wording.Count(len(problems), "error"))
	}
	if len(warnings) > 0 && c.strict {
		return cli.WithCode(fmt.Errorf("the files fit together, but not strictly: %s",
			wording.Count(len(warnings), "warning")), exitUnwise)
	}
	return nil
}

// file checks a file alone, and prints what it finds. It adds a valid file to c.sides.
func (c *checkRun) file(path string) error {
	data, file, err := cli.ReadInput(c.cmd.InOrStdin(), path)
	if err != nil {
		return err
	}
	read, hint, err := c.parse(data, file)
	out := c.cmd.OutOrStdout()
	if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
		fmt.Fprintln(out, problems.In(file))
		what := strings.TrimSpace(read.kind + " configuration") // kind is empty if the file is not YAML
		return fmt.Errorf("%s: invalid %s: %s%s", file, what, wording.Count(len(problems), "error"), hint)
	}
	if err != nil {
		return err
	}
	printFileWarnings(c.cmd.ErrOrStderr(), read.warnings.In(file))
	if c.against != "" {
		err := checkAgainst(c.against, read, c.cmd.ErrOrStderr())
		if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
			fmt.Fprintln(out, problems.In(file))
			return fmt.Errorf("%s: valid, but instance %q would refuse to reload it: %s", file, c.against,
				wording.Count(len(problems), "error"))
		}
		if err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "%s: valid %s configuration: %s\n", file, read.kind, read.content)
	if c.against != "" {
		fmt.Fprintf(out, "instance %q would reload it\n", c.against)
	}
	c.sides = append(c.sides, read.side)
	if !c.strict {
		return nil
	}
	return c.strictly(file, read, data)
}

// parse parses the content of a file for the role that --role names. Without --role, it takes the
// role to which the fields of the file belong. In this case it also returns a hint for users who
// meant the other role.
func (c *checkRun) parse(data []byte, file string) (read checkedFile, hint string, err error) {
	role := c.role
	if role == "" {
		if role, hint, err = guessRole(data); err != nil {
			return read, hint, err
		}
	}
	read, err = parseFor(role, data, file)
	return read, hint, err
}

// exitUnwise is the exit code of --strict for valid files with warnings or findings.
const exitUnwise = 2

// strictly prints the findings about a valid file. If the file has findings or warnings, strictly
// returns an error with the exit code exitUnwise.
func (c *checkRun) strictly(file string, read checkedFile, data []byte) error {
	findings, err := read.inspect(file, data, config.ThisHost())
	if err != nil {
		return err
	}
	isAllowed := func(f config.Finding) bool { return slices.Contains(c.allow, f.Rule) }
	findings = slices.DeleteFunc(findings, isAllowed)
	for _, f := range findings {
		fmt.Fprintf(c.cmd.ErrOrStderr(), "finding: %v [%s]\n", f.Error, f.Rule)
	}
	if len(findings)+len(read.warnings) == 0 {
		return nil
	}
	return cli.WithCode(fmt.Errorf("%s: valid, but not strictly: %s, %s", file,
		wording.Count(len(read.warnings), "warning"), wording.Count(len(findings), "finding")), exitUnwise)
}

// checkedFile describes a valid file. For an invalid file only the kind is set.
type checkedFile struct {
	kind     string // balancer or agent
	instance string
	content  string // how many services and servers it has, or where its services are
	warnings fieldpath.Errors
	fixed    []desired.Setting // the settings that only a restart can change
	// overrides reads the overrides of the instance, and applies them to the file. It returns the
	// overrides that are invalid, and the warnings about the file followed by those about overrides.
	overrides func() (invalid []desired.InvalidOverride, warnings fieldpath.Errors, err error)
	// inspect returns the findings of --strict.
	inspect func(path string, data []byte, host config.Host) ([]config.Finding, error)
	// side is the part of the file that is compared with other files.
	side *config.Side
}

// parseFor parses the content of a file. The role is lb for a balancer, or agent.
func parseFor(role string, data []byte, file string) (checkedFile, error) {
	switch role {
	case "lb":
		b, warnings, err := config.ParseBalancer(data)
		if err != nil {
			return checkedFile{kind: string(datapath.RoleBalancer)}, err
		}
		content := wording.Count(len(b.Services), "service") + ", " + wording.Count(countServers(b), "server")
		if b.Store != nil {
			content = "the services are in the store, below " + b.Store.Etcd.Prefix
		}
		return checkedFile{
			string(datapath.RoleBalancer), b.Node.Instance, content, warnings, b.Fixed(),
			withOverrides(data, config.ParseBalancerFiles), config.InspectBalancer, config.BalancerSide(file, data),
		}, nil
	case "agent":
		a, warnings, err := config.ParseAgent(data)
		if err != nil {
			return checkedFile{kind: string(datapath.RoleAgent)}, err
		}
		content := wording.Count(len(a.Services), "service")
		return checkedFile{
			string(datapath.RoleAgent), a.Node.Instance, content, warnings, a.Fixed(),
			withOverrides(data, config.ParseAgentFiles), config.InspectAgent, config.AgentSide(file, data),
		}, nil
	}
	return checkedFile{}, fmt.Errorf("--role %q: must be lb or agent", role)
}

// withOverrides returns a function for checkedFile.overrides. The function parses data, the content
// of a file, together with the overrides of the instance. It returns the invalid overrides, and the
// warnings about the file and the overrides.
func withOverrides[D config.State[D]](
	data []byte, parse func([]byte) (*config.Files[D], fieldpath.Errors, error),
) func() ([]desired.InvalidOverride, fieldpath.Errors, error) {
	return func() ([]desired.InvalidOverride, fieldpath.Errors, error) {
		files, warnings, err := parse(data)
		if err != nil {
			return nil, nil, err
		}
		return files.Invalid, warnings, nil
	}
}

// checkAgainst compares a file with the configuration that an instance runs with. If the process
// would refuse to reload the file, the error is of type fieldpath.Errors.
func checkAgainst(instance string, file checkedFile, warnings io.Writer) error {
	if err := desired.CheckInstance(instance); err != nil {
		return fmt.Errorf("--against: %w", err)
	}
	process, err := rundir.FindProcess(instance)
	if err != nil {
		return fmt.Errorf("--against %s: %w", instance, err)
	}
	if process == nil {
		return fmt.Errorf("--against %s: no process runs the instance", instance)
	}
	record, err := rundir.FindRecord(instance, process)
	switch {
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("--against %s (which needs root): %w", instance, err)
	case err != nil:
		return fmt.Errorf("--against %s: %w", instance, err)
	case record == nil:
		return fmt.Errorf("--against %s: process %d runs a build that does not record its configuration; "+
			"restart it", instance, process.PID)
	case record.Role != file.kind:
		return fmt.Errorf("--against %s: the instance has the role %s, but the file is for the role %s",
			instance, record.Role, file.kind)
	}
	if err := desired.CheckFixed(file.fixed, record.Fixed); err != nil {
		return err
	}
	invalid, all, err := file.overrides()
	if err != nil {
		return err
	}
	// The process leaves out some invalid overrides already. These do not make it refuse a reload.
	var leftOut []desired.Override
	for _, o := range record.Configuration.InvalidOverrides {
		leftOut = append(leftOut, o.Override)
	}
	if problems := desired.NewlyInvalid(invalid, leftOut); len(problems) > 0 {
		return problems
	}
	aboutOverrides := all[len(file.warnings):] // those about the file are printed already
	printFileWarnings(warnings, aboutOverrides)
	return nil
}

func printFileWarnings(out io.Writer, warnings fieldpath.Errors) {
	for _, warning := range warnings {
		fmt.Fprintln(out, "warning:", warning)
	}
}

// guessRole returns the role to which the fields of a file belong, and a hint for users who meant
// the other role. It returns an error if the file is not YAML, or is the topology of a lab.
func guessRole(data []byte) (role, hint string, err error) {
	kind, err := config.KindOf(data)
	switch {
	case err != nil:
		return "", "", err
	case kind == config.TopologyFile:
		return "", "", errors.New("this is the topology of a lab: segue-lab lab check FILE validates it, and for a " +
			"balancer's file, use --role lb")
	case kind == config.BalancerFile:
		return "lb", " (for an agent's file, use --role agent)", nil
	}
	return "agent", " (for a balancer's file, use --role lb)", nil
}

// countServers counts the servers of all services. A server in two services counts twice.
func countServers(b *desired.Balancer) int {
	n := 0
	for _, s := range b.Services {
		n += len(s.Servers)
	}
	return n
}
